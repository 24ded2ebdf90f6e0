// isa/portable.cpp: plain C++ for any CPU the compiler targets. Products fit int32 as they are; nothing saturates.
#include "moe.h"
#include "numerics.h"

namespace int8moe::portable {
namespace {

constexpr int kLanes = 4, kGroup = 4, kBlock = 4;
constexpr Tail kTail = Tail::none;
typedef float VF __attribute__((vector_size(4 * kLanes)));
typedef int32_t VI __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VU __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VH __attribute__((vector_size(2 * kLanes)));
typedef int8_t VC __attribute__((vector_size(kLanes)));
typedef int16_t V8h __attribute__((vector_size(16)));
typedef int8_t V8c __attribute__((vector_size(8)));

template <int T>
inline void dot_panel(const int8_t* panel, int64_t groups, const int8_t* const* x, const char*, VI (&acc)[T][2]) {
  VI sum[T][2] = {};
  for (int64_t g = 0; g < groups; ++g, panel += 8 * kGroup) {
    V8h w[kGroup];  // w[i]: rows 2i and 2i+1, four columns each, as int16: a product (at most 128 * 127) fits
    for (int i = 0; i < 4; ++i) {
      V8c bytes;
      __builtin_memcpy(&bytes, panel + 8 * i, 8);
      w[i] = __builtin_convertvector(bytes, V8h);
    }
    for (int t = 0; t < T; ++t) {
      const int8_t* p = x[t] + kGroup * g;
      const V8h c = {p[0], p[1], p[2], p[3], p[0], p[1], p[2], p[3]};
      for (int i = 0; i < 4; ++i) {
        const V8h m = w[i] * c;
        sum[t][i / 2][i % 2 * 2] += (m[0] + m[1]) + (m[2] + m[3]);
        sum[t][i / 2][i % 2 * 2 + 1] += (m[4] + m[5]) + (m[6] + m[7]);
      }
    }
  }
  for (int t = 0; t < T; ++t) acc[t][0] = sum[t][0], acc[t][1] = sum[t][1];
}

inline VH to_bf16(VF v) {
  const VU b = (VU)v;
  const VU even = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  const VU quiet = (b >> 16) | 0x40u;
  return __builtin_convertvector((VU)((VI)(b & 0x7fffffffu) > 0x7f800000 ? quiet : even), VH);
}
inline VF from_bf16(VH v) { return (VF)(__builtin_convertvector(v, VU) << 16); }

// Round to nearest even by integer arithmetic; a subnormal half by adding a float whose last bit is the half's last bit.
inline VH to_f16(VF v) {
  const VU b = (VU)v, sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
  const VU normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  const VF magic = {0.5f, 0.5f, 0.5f, 0.5f};
  const VU small = (VU)((VF)a + magic) - 0x3f000000u;
  const VU infinite = VU{} + 0x7c00u, nan = VU{} + 0x7e00u;
  const VI s = (VI)a;  // compared as signed: the sign bit is clear
  VU r = s < 0x38800000 ? small : normal;
  r = s >= 0x477ff000 ? infinite : r;  // 65520 and above round to infinity
  r = s > 0x7f800000 ? nan : r;
  return __builtin_convertvector(r | sign, VH);
}
inline VF from_f16(VH v) {
  const VU h = __builtin_convertvector(v, VU), sign = (h & 0x8000u) << 16, a = h & 0x7fffu;
  const VU normal = (a << 13) + 0x38000000u;
  const VU small = (VU)(__builtin_convertvector((VI)a, VF) * 0x1p-24f);
  const VU special = (a << 13) + 0x70000000u;
  const VI s = (VI)a;
  VU r = s < 0x400 ? small : normal;
  r = s >= 0x7c00 ? special : r;
  return (VF)(r | sign);
}

inline void store_codes(int8_t* p, VF v) {
  const VC c = __builtin_convertvector(__builtin_convertvector(v, VI), VC);
  __builtin_memcpy(p, &c, sizeof c);
}
inline int32_t max_lane(VI v) {
  int32_t most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

}  // namespace
#include "moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = kFns;
}  // namespace int8moe::portable

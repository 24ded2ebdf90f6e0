// isa/portable.cpp: plain C++ for any CPU the compiler targets. Products are widened to int32; nothing saturates.
#include "../moe.h"
#include "../numerics.h"
#include "half_software.h"

namespace int8moe::portable {
namespace {

typedef float VF __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));
typedef uint32_t VU __attribute__((vector_size(32)));
typedef uint16_t VH __attribute__((vector_size(16)));
typedef int8_t VC __attribute__((vector_size(8)));
typedef int16_t VS __attribute__((vector_size(16)));

constexpr int kBlock = 4;

template <int T>
inline void dot_tile(const int8_t* tile, long groups, const int8_t* const* x, const char*, VI (&acc)[T][2]) {
  int32_t sum[T][kTileRows] = {};
  for (long g = 0; g < groups; ++g, tile += kTileRows * kGroup) {
    for (int c = 0; c < kTileRows; c += 2) {
      VC bytes;  // two rows of four columns: as int16, a product (at most 128 * 127) fits
      __builtin_memcpy(&bytes, tile + c * kGroup, sizeof bytes);
      const VS w = __builtin_convertvector(bytes, VS);
      for (int t = 0; t < T; ++t) {
        const int8_t* p = x[t] + kGroup * g;
        const VS m = w * VS{p[0], p[1], p[2], p[3], p[0], p[1], p[2], p[3]};
        sum[t][c] += (m[0] + m[1]) + (m[2] + m[3]);
        sum[t][c + 1] += (m[4] + m[5]) + (m[6] + m[7]);
      }
    }
  }
  __builtin_memcpy(&acc, &sum, sizeof acc);
}

inline VH to_bf16(VF v) {
  const VU b = (VU)v;
  const VU even = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16, quiet = (b >> 16) | 0x40u;
  return __builtin_convertvector((VI)(b & 0x7fffffffu) > 0x7f800000 ? quiet : even, VH);
}
inline VF from_bf16(VH v) { return (VF)(__builtin_convertvector(v, VU) << 16); }
#include "half_vector.inl"

inline void store_codes(int8_t* p, VF v) {
  const VC c = __builtin_convertvector(__builtin_convertvector(v, VI), VC);
  __builtin_memcpy(p, &c, sizeof c);
}
inline int32_t max_lane(VI v) {
  int32_t most = v[0];
  for (int i = 1; i < 8; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

}  // namespace
#include "../moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = {quantize_rows, gemm<true>, gemm<false>, combine, map};
}  // namespace int8moe::portable

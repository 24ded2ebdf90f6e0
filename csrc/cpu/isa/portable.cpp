// isa/portable.cpp: plain C++ for any CPU the compiler targets. Products are widened to int16, sums to int32; nothing
// saturates.
#include "../dot.h"
#include "../numerics.h"
#include "half_software.h"

namespace int8moe::portable {
namespace {

#include "vector_portable.inl"

inline VF load_half(const uint16_t* p) {
  VF v;
  for (int i = 0; i < 8; ++i) v[i] = half_to_float(p[i]);
  return v;
}
inline void store_half(uint16_t* p, VF v) {
  for (int i = 0; i < 8; ++i) p[i] = float_to_half(v[i]);
}

typedef int16_t VS __attribute__((vector_size(16)));

constexpr int kBlock = 4, kTiles = 1;
struct Session {
  explicit Session(const Codes&) {}
};

template <int T>
inline void dot_rows(const Dot& d) {
  int32_t sum[T][kTileRows] = {};
  const int8_t* tile = d.w;
  for (long g = 0; g < d.groups; ++g, tile += kTileRows * kGroup) {
    for (int c = 0; c < kTileRows; c += 2) {
      VC bytes;  // two rows of four columns: as int16, a product (at most 128 * 127) fits
      __builtin_memcpy(&bytes, tile + c * kGroup, sizeof bytes);
      const VS w = __builtin_convertvector(bytes, VS);
      for (int t = 0; t < T; ++t) {
        const int8_t* p = d.q + t * d.stride + kGroup * g;
        const VS m = w * VS{p[0], p[1], p[2], p[3], p[0], p[1], p[2], p[3]};
        sum[t][c] += (m[0] + m[1]) + (m[2] + m[3]);
        sum[t][c + 1] += (m[4] + m[5]) + (m[6] + m[7]);
      }
    }
  }
  for (int t = 0; t < T; ++t) __builtin_memcpy(d.sums + t * d.sum_stride, sum[t], sizeof sum[t]);
}

#include "rows.inl"
void dot(const Dot& d) { by_rows(d); }

// Products of a step of dot_rows, widened and summed; the operands come from the first cache.
void chain(long steps) {
  VS w = {1, 2, 3, 4, 5, 6, 7, 8}, x = w;
  VI acc[4] = {};
  for (long i = 0; i < steps; ++i) {
    for (int k = 0; k < 4; ++k) {
      __asm__ volatile("" : "+m"(w), "+m"(x));
      acc[k] = acc[k] + __builtin_convertvector(w * x, VI);
    }
  }
  __asm__ volatile("" : : "m"(acc));
}
const Peak peaks[] = {{"widened products", 4 * 8 * 2.0, chain}};

}  // namespace
#include "../moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = {quantize_row, gemm<true>, gemm<false>, combine, map, nullptr, peaks, 1};
}  // namespace int8moe::portable

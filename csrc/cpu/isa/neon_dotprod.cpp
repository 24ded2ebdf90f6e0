// isa/neon_dotprod.cpp: Arm NEON with the dot-product instruction: sdot sums four signed products a lane, exactly.
#include <arm_neon.h>

#include "../dot.h"
#include "../numerics.h"

namespace int8moe::neon_dotprod {
namespace {

#include "vector_neon.inl"

constexpr int kBlock = 5, kTiles = 1;  // 20 sums, 4 vectors of weights, 5 of codes: 29 of 32 registers
struct Session {
  explicit Session(const Codes&) {}
};

// Four groups of columns: lane L of the codes meets the group L.
template <int T, int L>
inline void group(int32x4_t (&acc)[T][4], const int8_t* tile, const int8x16_t (&x)[T]) {
  for (int v = 0; v < 4; ++v) {
    const int8x16_t w = vld1q_s8(tile + 64 * L + 16 * v);
    for (int t = 0; t < T; ++t) acc[t][v] = vdotq_laneq_s32(acc[t][v], w, x[t], L);
  }
}

template <int T>
inline void dot_rows(const Dot& d) {
  int32x4_t acc[T][4];
  for (int t = 0; t < T; ++t)
    for (int v = 0; v < 4; ++v) acc[t][v] = vdupq_n_s32(0);
  const int8_t *tile = d.w, *q = d.q;
  int8x16_t x[T];
  long g = 0;
  for (; g + 4 <= d.groups; g += 4, tile += 4 * 64, q += 16) {
    for (int t = 0; t < T; ++t) x[t] = vld1q_s8(q + t * d.stride);
    group<T, 0>(acc, tile, x);
    group<T, 1>(acc, tile, x);
    group<T, 2>(acc, tile, x);
    group<T, 3>(acc, tile, x);
  }
  for (int t = 0; t < T; ++t) x[t] = vld1q_s8(q + t * d.stride);  // inside the stride: whole cache lines
  if (g + 1 <= d.groups) group<T, 0>(acc, tile, x);
  if (g + 2 <= d.groups) group<T, 1>(acc, tile, x);
  if (g + 3 <= d.groups) group<T, 2>(acc, tile, x);
  for (int t = 0; t < T; ++t)
    for (int v = 0; v < 4; ++v) vst1q_s32(d.sums + t * d.sum_stride + 4 * v, acc[t][v]);
}

#include "rows.inl"
void dot(const Dot& d) { by_rows(d); }

void chain(long steps) {
  int32x4_t acc[12];
  int8x16_t w = vdupq_n_s8(3), x = vdupq_n_s8(-2);
  for (int k = 0; k < 12; ++k) acc[k] = vdupq_n_s32(0);
  for (long i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < 12; ++k) {
      __asm__ volatile("" : "+w"(w), "+w"(x));
      acc[k] = vdotq_s32(acc[k], w, x);
    }
  }
  for (int k = 0; k < 12; ++k) __asm__ volatile("" : : "w"(acc[k]));
}
const Peak peaks[] = {{"sdot", 12 * 16 * 2.0, chain}};

}  // namespace
#include "../moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = {quantize_row, gemm<true>, gemm<false>, combine, map, nullptr, peaks, 1};
}  // namespace int8moe::neon_dotprod

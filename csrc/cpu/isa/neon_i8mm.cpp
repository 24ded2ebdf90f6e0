// isa/neon_i8mm.cpp: Arm NEON with the int8 matrix multiplication: smmla multiplies two rows of eight codes with two
// rows of eight weights, exactly. One row alone takes the dot-product way.
#include <arm_neon.h>

#include "../dot.h"
#include "../numerics.h"

namespace int8moe::neon_i8mm {
namespace {

#include "vector_neon.inl"

constexpr int kBlock = 4, kTiles = 1;  // 16 sums, 8 vectors of weights, 1 of codes: 25 of 32 registers
struct Session {
  explicit Session(const Codes&) {}
};

// Weights of rows 2v and 2v + 1, eight columns each, from two groups of a tile.
inline void pair_of_groups(const int8_t* tile, int8x16_t (&w)[8]) {
  for (int v = 0; v < 4; ++v) {
    const int32x4_t a = vreinterpretq_s32_s8(vld1q_s8(tile + 16 * v));
    const int32x4_t b = vreinterpretq_s32_s8(vld1q_s8(tile + 64 + 16 * v));
    w[2 * v] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
    w[2 * v + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
  }
}
// The same of the last, single group: zero in the columns beyond.
inline void last_group(const int8_t* tile, int8x16_t (&w)[8]) {
  for (int v = 0; v < 4; ++v) {
    const int32x4_t a = vreinterpretq_s32_s8(vld1q_s8(tile + 16 * v)), none = vdupq_n_s32(0);
    w[2 * v] = vreinterpretq_s8_s32(vzip1q_s32(a, none));
    w[2 * v + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, none));
  }
}

template <int T>
inline void dot_rows(const Dot& d) {
  constexpr int P = (T + 1) / 2;  // pairs of rows; an odd last row is paired with itself
  int32x4_t acc[P][8];
  for (int p = 0; p < P; ++p)
    for (int v = 0; v < 8; ++v) acc[p][v] = vdupq_n_s32(0);
  const int8_t *tile = d.w, *q = d.q;
  for (long g = 0; g < d.groups; g += 2, tile += 128, q += 8) {
    int8x16_t w[8];
    if (g + 2 <= d.groups) {
      pair_of_groups(tile, w);
    } else {
      last_group(tile, w);
    }
    for (int p = 0; p < P; ++p) {
      const int8_t* second = q + (2 * p + 1 < T ? 2 * p + 1 : 2 * p) * d.stride;
      const int8x16_t x = vcombine_s8(vld1_s8(q + 2 * p * d.stride), vld1_s8(second));
      for (int v = 0; v < 8; ++v) acc[p][v] = vmmlaq_s32(acc[p][v], x, w[v]);
    }
  }
  for (int p = 0; p < P; ++p) {
    for (int v = 0; v < 8; ++v) {
      vst1_s32(d.sums + 2 * p * d.sum_stride + 2 * v, vget_low_s32(acc[p][v]));
      if (2 * p + 1 < T) vst1_s32(d.sums + (2 * p + 1) * d.sum_stride + 2 * v, vget_high_s32(acc[p][v]));
    }
  }
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
      acc[k] = vmmlaq_s32(acc[k], w, x);
    }
  }
  for (int k = 0; k < 12; ++k) __asm__ volatile("" : : "w"(acc[k]));
}
const Peak peaks[] = {{"smmla", 12 * 32 * 2.0, chain}};

}  // namespace
#include "../moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = {quantize_row, gemm<true>, gemm<false>, combine, map, nullptr, peaks, 1};
}  // namespace int8moe::neon_i8mm

// isa/avxvnni.cpp: AVX-VNNI (256 bit). vpdpbusd sums four products of unsigned and signed codes without saturation:
// w + 128 is the unsigned operand, so a sum starts at -128 times the sum of the row's codes.
#include <immintrin.h>

#include "../dot.h"
#include "../numerics.h"

namespace int8moe::avxvnni {
namespace {

#include "vector_avx2.inl"

#ifndef VECTOR_REGISTER
#define VECTOR_REGISTER "x"
#endif

constexpr int kBlock = 6, kTiles = 1;  // 12 sums, 2 vectors of weights, 1 of codes: 16 registers with the offset
struct Session {
  explicit Session(const Codes&) {}
};

// Unrolled and out of line as in dot_vnni512.inl.
template <int T>
__attribute__((noinline)) void dot_rows(const Dot& d) {
  __m256i low[T], high[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) low[t] = high[t] = _mm256_set1_epi32((int32_t)(-128u * (uint32_t)d.q_sum[t]));
  const __m256i offset = _mm256_set1_epi8(-128);
  const int8_t *tile = d.w, *q = d.q;
  for (long g = 0; g < d.groups; ++g, tile += kTileRows * kGroup, q += kGroup) {
    const __m256i w0 = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile)), offset);
    const __m256i w1 = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 32)), offset);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      int32_t four;
      __builtin_memcpy(&four, q + t * d.stride, sizeof four);
      const __m256i x = _mm256_set1_epi32(four);
      low[t] = _mm256_dpbusd_avx_epi32(low[t], w0, x);
      high[t] = _mm256_dpbusd_avx_epi32(high[t], w1, x);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(d.sums + t * d.sum_stride), low[t]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(d.sums + t * d.sum_stride + 8), high[t]);
  }
}

#include "rows.inl"
void dot(const Dot& d) { by_rows(d); }

void chain(long steps) {
  __m256i acc[12], w = _mm256_set1_epi8(3), x = _mm256_set1_epi8(-2);
#pragma GCC unroll 12
  for (int k = 0; k < 12; ++k) acc[k] = _mm256_setzero_si256();
  for (long i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < 12; ++k) {
      __asm__ volatile("" : "+" VECTOR_REGISTER(w), "+" VECTOR_REGISTER(x));
      acc[k] = _mm256_dpbusd_avx_epi32(acc[k], w, x);
    }
  }
#pragma GCC unroll 12
  for (int k = 0; k < 12; ++k) __asm__ volatile("" : : VECTOR_REGISTER(acc[k]));
}
const Peak peaks[] = {{"dpbusd, 256 bit", 12 * 32 * 2.0, chain}};

}  // namespace
#include "../moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = {quantize_row, gemm<true>, gemm<false>, combine, map, nullptr, peaks, 1};
}  // namespace int8moe::avxvnni

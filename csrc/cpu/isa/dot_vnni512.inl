// vpdpbusd on 512 bits: a tile's group of columns is one vector, and the codes are the broadcast memory operand.
// w + 128 is the unsigned operand, so a sum starts at -128 times the sum of the row's codes.

constexpr int kFew = 4;  // rows up to which the processor's own prefetchers do better than fetching by hand

// Unrolled by demand and out of line: GCC leaves an array of sums that it loops over, or inlines beside other vectors,
// in memory, and the loop took twice as long.
template <int T, int R>
__attribute__((noinline)) void vnni(const Dot& d) {
  __m512i acc[T][R];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) acc[t][r] = _mm512_set1_epi32((int32_t)(-128u * (uint32_t)d.q_sum[t]));
  const __m512i offset = _mm512_set1_epi8(-128);
  const int8_t *tile = d.w, *q = d.q;
  const long ahead = d.next ? R : 0;
  for (long g = 0; g < d.groups; ++g, tile += kTileRows * kGroup, q += kGroup) {
    __m512i w[R];
    for (int r = 0; r < R; ++r) w[r] = _mm512_xor_si512(_mm512_loadu_si512(tile + r * d.tile_bytes), offset);
    if (T > kFew) {
      for (int r = 0; r < R; ++r)
        _mm_prefetch(reinterpret_cast<const char*>(tile + (ahead + r) * d.tile_bytes), _MM_HINT_T1);
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      int32_t four;
      __builtin_memcpy(&four, q + t * d.stride, sizeof four);
      const __m512i x = _mm512_set1_epi32(four);
      for (int r = 0; r < R; ++r) acc[t][r] = _mm512_dpbusd_epi32(acc[t][r], w[r], x);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) _mm512_storeu_si512(d.sums + t * d.sum_stride + r * kTileRows, acc[t][r]);
}

template <int T>
inline void dot_rows(const Dot& d) {
  if (d.tiles == 1) return vnni<T, 1>(d);
  if (T > kFew || !d.cold) return vnni<T, 2>(d);
  // The wait is for memory: one straight line, which the processor's prefetchers follow further than two.
  Dot one = d;
  one.tiles = 1;
  vnni<T, 1>(one);
  one.w += d.tile_bytes, one.sums += kTileRows;
  vnni<T, 1>(one);
}

void chain512(long steps) {
  __m512i acc[12], w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(-2);
  for (int k = 0; k < 12; ++k) acc[k] = _mm512_setzero_si512();
  for (long i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < 12; ++k) {
      __asm__ volatile("" : "+" VECTOR_REGISTER(w), "+" VECTOR_REGISTER(x));
      acc[k] = _mm512_dpbusd_epi32(acc[k], w, x);
    }
  }
  for (int k = 0; k < 12; ++k) __asm__ volatile("" : : VECTOR_REGISTER(acc[k]));
}

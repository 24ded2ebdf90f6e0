// Stands in for the compiler's header where AVX-512 and AMX code must run on a processor without them: SIMDe for the
// vectors, plain loops for the tile registers. For tests of logic, not of speed.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

#include <cstdint>
#include <cstdlib>
#define _mm_prefetch(p, hint) ((void)(p))
#define VECTOR_REGISTER "m"
#include <cstring>

#include "../../../csrc/cpu/isa/half_software.h"

// What SIMDe lacks.
#define _mm512_stream_si512(p, v) ((uintptr_t)(p) % 64 ? std::abort() : _mm512_storeu_si512(p, v))  // as it would
#define _mm256_dpbusd_avx_epi32 simde_mm256_dpbusd_epi32  // its other encoding
#define __mmask16 simde__mmask16
template <class To, class From, class Fn>
static inline To emulated_map(From from, Fn fn) {
  typedef decltype(fn(0)) Lane;
  Lane lanes[16];
  To to;
  for (int i = 0; i < 16; ++i) lanes[i] = fn(i);
  (void)from;
  std::memcpy(&to, lanes, sizeof to);
  return to;
}
template <class Lane, class V>
static inline Lane emulated_lane(const V& v, int i) {
  Lane lane;
  std::memcpy(&lane, (const char*)&v + i * sizeof(Lane), sizeof lane);
  return lane;
}
static inline __m256i _mm512_cvtepi32_epi16(__m512i v) {
  return emulated_map<__m256i>(v, [&](int i) { return (int16_t)emulated_lane<int32_t>(v, i); });
}
static inline __m128i _mm512_cvtepi32_epi8(__m512i v) {
  return emulated_map<__m128i>(v, [&](int i) { return (int8_t)emulated_lane<int32_t>(v, i); });
}
static inline __m512i _mm512_cvtepu16_epi32(__m256i v) {
  return emulated_map<__m512i>(v, [&](int i) { return (int32_t)emulated_lane<uint16_t>(v, i); });
}
static inline __m512i _mm512_cvtps_epi32(__m512 v) {
  return emulated_map<__m512i>(v, [&](int i) { return (int32_t)__builtin_rintf(emulated_lane<float>(v, i)); });
}
static inline __m512 _mm512_cvtph_ps(__m256i v) {
  return emulated_map<__m512>(v,
                              [&](int i) { return int8moe::portable::half_to_float(emulated_lane<uint16_t>(v, i)); });
}
static inline __m256i _mm512_cvtps_ph(__m512 v, int) {
  return emulated_map<__m256i>(v, [&](int i) { return int8moe::portable::float_to_half(emulated_lane<float>(v, i)); });
}
static inline int32_t _mm512_reduce_max_epi32(__m512i v) {
  int32_t most = emulated_lane<int32_t>(v, 0);
  for (int i = 1; i < 16; ++i) most = emulated_lane<int32_t>(v, i) > most ? emulated_lane<int32_t>(v, i) : most;
  return most;
}
static inline int32_t _mm512_reduce_add_epi32(__m512i v) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += emulated_lane<int32_t>(v, i);
  return sum;
}

static thread_local int8_t emulated_tile[8][16][64];
static thread_local int emulated_rows[8];

// Like the processor, a tile register has the rows of the last configuration, and none after a release.
static inline void emulated_configure(const void* config) {
  for (int t = 0; t < 8; ++t) emulated_rows[t] = config ? ((const uint8_t*)config)[48 + t] : 0;
  std::memset(emulated_tile, 0, sizeof emulated_tile);
}
static inline void emulated_load(int t, const void* base, long stride) {
  std::memset(emulated_tile[t], 0, sizeof emulated_tile[t]);
  for (int r = 0; r < emulated_rows[t]; ++r) std::memcpy(emulated_tile[t][r], (const char*)base + r * stride, 64);
}
static inline void emulated_store(int t, void* base, long stride) {
  for (int r = 0; r < emulated_rows[t]; ++r) std::memcpy((char*)base + r * stride, emulated_tile[t][r], 64);
}
static inline void emulated_multiply(int c, int a, int b) {
  for (int m = 0; m < emulated_rows[c]; ++m) {
    for (int n = 0; n < 16; ++n) {
      int32_t sum;
      std::memcpy(&sum, emulated_tile[c][m] + 4 * n, 4);
      for (int k = 0; k < 64; ++k) sum += emulated_tile[a][m][k] * emulated_tile[b][k / 4][4 * n + k % 4];
      std::memcpy(emulated_tile[c][m] + 4 * n, &sum, 4);
    }
  }
}
#define _tile_loadconfig(p) emulated_configure(p)
#define _tile_release() emulated_configure(nullptr)
#define _tile_zero(t) std::memset(emulated_tile[t], 0, 1024)
#define _tile_loadd(t, base, stride) emulated_load(t, base, stride)
#define _tile_stored(t, base, stride) emulated_store(t, base, stride)
#define _tile_dpbssd(c, a, b) emulated_multiply(c, a, b)

// isa/avx2.cpp: AVX2. s8 x s8 -> s32, exact: w * x = |w| * (x with w's sign). |w| <= 128 is the unsigned operand of
// vpmaddubsw and x in -127..127 the signed one, so a pair of products lies in -32512..32512 and does not saturate.
#include <immintrin.h>

#include "../moe.h"
#include "../numerics.h"

namespace int8moe::avx2 {
namespace {

typedef float VF __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));
typedef uint16_t VH __attribute__((vector_size(16)));

constexpr int kBlock = 4;            // 8 sums, 4 halves of weights, codes, product and ones: 16 registers
constexpr long kPrefetchOne = 2048;  // bytes ahead in a tile that meets one row: the next tile follows it in memory

inline __m256i load_codes(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

template <int T>
inline void dot_tile(const int8_t* tile, long groups, const int8_t* const* x, const char* prefetch, VI (&acc)[T][2]) {
  __m256i low[T], high[T];
  const int8_t* row[T];
  for (int t = 0; t < T; ++t) row[t] = x[t], low[t] = high[t] = _mm256_setzero_si256();
  const __m256i ones = _mm256_set1_epi16(1);
  for (long g = 0; g < groups; ++g, tile += kTileRows * kGroup) {
    const __m256i w0 = load_codes(tile), w1 = load_codes(tile + 32);
    const __m256i u0 = _mm256_abs_epi8(w0), u1 = _mm256_abs_epi8(w1);
    _mm_prefetch(T == 1 ? reinterpret_cast<const char*>(tile) + kPrefetchOne : prefetch, _MM_HINT_T0);
    if (T != 1) prefetch += 16;
    for (int t = 0; t < T; ++t) {
      int32_t four;
      __builtin_memcpy(&four, row[t] + kGroup * g, sizeof four);
      const __m256i c = _mm256_set1_epi32(four);
      const __m256i p0 = _mm256_maddubs_epi16(u0, _mm256_sign_epi8(c, w0));
      const __m256i p1 = _mm256_maddubs_epi16(u1, _mm256_sign_epi8(c, w1));
      low[t] = _mm256_add_epi32(low[t], _mm256_madd_epi16(p0, ones));
      high[t] = _mm256_add_epi32(high[t], _mm256_madd_epi16(p1, ones));
    }
  }
  for (int t = 0; t < T; ++t) acc[t][0] = (VI)low[t], acc[t][1] = (VI)high[t];
}

inline VH to_bf16(VF v) {
  const __m256i b = (__m256i)v;
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  const __m256i even = _mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(b, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps((__m256)v, (__m256)v, _CMP_UNORD_Q);
  const __m256i r = _mm256_srli_epi32((__m256i)_mm256_blendv_ps((__m256)even, (__m256)quiet, nan), 16);
  return (VH)_mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
inline VF from_bf16(VH v) { return (VF)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)v), 16); }
inline VF load_half(const uint16_t* p) {
  return (VF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_half(uint16_t* p, VF v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}

inline void store_codes(int8_t* p, VF v) {
  const __m256i i = _mm256_cvtps_epi32((__m256)v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
inline int32_t max_lane(VI v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtsi128_si32(m);
}

}  // namespace
#include "../moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = {quantize_rows, gemm<true>, gemm<false>, combine, map};
}  // namespace int8moe::avx2

// isa/avx2.cpp: AVX2. s8 x s8 -> s32, exact, at four instructions for 32 products:
// w * x = |w| * (x ^ m) + (w < 0 ? |w| : 0), where m is -1 for a negative w and 0 otherwise, because x ^ -1 = -x - 1.
// |w| <= 128 is the unsigned operand of vpmaddubsw and x ^ m in -128..127 the signed one: a pair of products lies in
// -32768..32512 and does not saturate. The second term does not depend on x: the panel's tail holds its sum per row.
// (vpsignb would need no tail; on Zen it shares two ports with both multiplies, the xor does not.)
#include <immintrin.h>

#include "moe.h"
#include "numerics.h"

namespace int8moe::avx2 {
namespace {

constexpr int kLanes = 8, kGroup = 4, kBlock = 4;
constexpr Tail kTail = Tail::negative_sum;
typedef float VF __attribute__((vector_size(4 * kLanes)));
typedef int32_t VI __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VH __attribute__((vector_size(2 * kLanes)));

constexpr int64_t kPrefetchOne = 2048;  // bytes ahead in a panel that is read once

inline __m256i load_codes(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

template <int T>
inline void dot_panel(const int8_t* panel, int64_t groups, const int8_t* const* x, const char* prefetch, VI (&acc)[T][2]) {
  const int8_t* tail = panel + groups * 2 * kLanes * kGroup;
  __m256i low[T], high[T];
  for (int t = 0; t < T; ++t) low[t] = load_codes(tail), high[t] = load_codes(tail + 32);
  const __m256i ones = _mm256_set1_epi16(1), zero = _mm256_setzero_si256();
  const int8_t* row[T];
  for (int t = 0; t < T; ++t) row[t] = x[t];
  for (int64_t g = 0; g < groups; ++g, panel += 64) {
    const __m256i w0 = load_codes(panel), w1 = load_codes(panel + 32);
    const __m256i m0 = _mm256_cmpgt_epi8(zero, w0), m1 = _mm256_cmpgt_epi8(zero, w1);
    const __m256i u0 = _mm256_abs_epi8(w0), u1 = _mm256_abs_epi8(w1);
    _mm_prefetch(T == 1 ? reinterpret_cast<const char*>(panel) + kPrefetchOne : prefetch, _MM_HINT_T0);
    if (T != 1) prefetch += 16;
    for (int t = 0; t < T; ++t) {
      int32_t four;
      __builtin_memcpy(&four, row[t] + kGroup * g, 4);
      const __m256i c = _mm256_set1_epi32(four);
      const __m256i p0 = _mm256_maddubs_epi16(u0, _mm256_xor_si256(c, m0));
      const __m256i p1 = _mm256_maddubs_epi16(u1, _mm256_xor_si256(c, m1));
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
inline VH to_f16(VF v) { return (VH)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline VF from_f16(VH v) { return (VF)_mm256_cvtph_ps((__m128i)v); }

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
#include "moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = kFns;
}  // namespace int8moe::avx2

// The float primitives of moe.inl with AVX2 and F16C. Included inside an ISA file's own namespace.

typedef float VF __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));
typedef uint16_t VH __attribute__((vector_size(16)));

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
inline int32_t sum_lanes(VI v) {
  __m128i m = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtsi128_si32(m);
}
// The second operand where one is NaN.
inline VF at_least(VF v, VF low) { return (VF)_mm256_max_ps((__m256)low, (__m256)v); }
inline VF at_most(VF v, VF high) { return (VF)_mm256_min_ps((__m256)high, (__m256)v); }
inline VF in_order(VF v) { return v; }

// The float primitives of moe.inl with AVX-512, sixteen lanes. Included inside an ISA file's own namespace.

typedef float VF __attribute__((vector_size(64)));
typedef int32_t VI __attribute__((vector_size(64)));
typedef uint16_t VH __attribute__((vector_size(32)));

inline VH to_bf16(VF v) {
  const __m512i b = (__m512i)v;
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  const __m512i even = _mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_mask_or_epi32(even, nan, b, _mm512_set1_epi32(0x400000));
  return (VH)_mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
}
inline VF from_bf16(VH v) { return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16); }
inline VF load_half(const uint16_t* p) {
  return (VF)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_half(uint16_t* p, VF v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}

// The second operand where one is NaN.
inline VF at_least(VF v, VF low) { return (VF)_mm512_max_ps((__m512)low, (__m512)v); }
inline VF at_most(VF v, VF high) { return (VF)_mm512_min_ps((__m512)high, (__m512)v); }

// A value that the compiler computes where it stands, not where it is used.
#ifndef VECTOR_REGISTER
#define VECTOR_REGISTER "v"
#endif
inline VF in_order(VF v) {
  __asm__ volatile("" : "+" VECTOR_REGISTER(v));
  return v;
}

inline void store_codes(int8_t* p, VF v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)v)));
}
// In a register: a load of what two stores have just written would wait until both have left for the cache.
template <class Eight>
inline VI join(Eight a, Eight b) {
  return (VI)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)a), (__m256i)b, 1);
}
template <class H>
inline void store_non_temporal(uint16_t* p, H a, H b) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)join(a, b));
}
inline int32_t max_lane(VI v) { return _mm512_reduce_max_epi32((__m512i)v); }
inline int32_t sum_lanes(VI v) { return _mm512_reduce_add_epi32((__m512i)v); }

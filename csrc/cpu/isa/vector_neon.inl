// The float16 primitives of moe.inl with NEON's conversions; the others in the compiler's vector types.
#include "vector_portable.inl"

inline VF load_half(const uint16_t* p) {
  float16_t h[8];
  __builtin_memcpy(h, p, sizeof h);
  const float32x4_t low = vcvt_f32_f16(vld1_f16(h)), high = vcvt_f32_f16(vld1_f16(h + 4));
  VF v;
  __builtin_memcpy(&v, &low, 16);
  __builtin_memcpy(reinterpret_cast<char*>(&v) + 16, &high, 16);
  return v;
}
inline void store_half(uint16_t* p, VF v) {
  float32x4_t low, high;
  __builtin_memcpy(&low, &v, 16);
  __builtin_memcpy(&high, reinterpret_cast<char*>(&v) + 16, 16);
  const float16x4_t h[2] = {vcvt_f16_f32(low), vcvt_f16_f32(high)};
  __builtin_memcpy(p, h, sizeof h);
}

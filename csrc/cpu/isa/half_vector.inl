// Eight float16 values through the scalar conversion.
typedef float half_vf __attribute__((vector_size(32)));
static inline half_vf load_half(const uint16_t* p) {
  half_vf v;
  for (int i = 0; i < 8; ++i) v[i] = half_to_float(p[i]);
  return v;
}
static inline void store_half(uint16_t* p, half_vf v) {
  for (int i = 0; i < 8; ++i) p[i] = float_to_half(v[i]);
}

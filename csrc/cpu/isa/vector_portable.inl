// The float primitives of moe.inl in the compiler's vector types, but for float16. Included inside an ISA file's own
// namespace.

typedef float VF __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));
typedef uint32_t VU __attribute__((vector_size(32)));
typedef uint16_t VH __attribute__((vector_size(16)));
typedef int8_t VC __attribute__((vector_size(8)));

inline VH to_bf16(VF v) {
  const VU b = (VU)v;
  const VU even = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16, quiet = (b >> 16) | 0x40u;
  return __builtin_convertvector((VI)(b & 0x7fffffffu) > 0x7f800000 ? quiet : even, VH);
}
inline VF from_bf16(VH v) { return (VF)(__builtin_convertvector(v, VU) << 16); }

inline void store_codes(int8_t* p, VF v) {
  const VC c = __builtin_convertvector(__builtin_convertvector(v, VI), VC);
  __builtin_memcpy(p, &c, sizeof c);
}
inline int32_t max_lane(VI v) {
  int32_t most = v[0];
  for (int i = 1; i < 8; ++i) most = v[i] > most ? v[i] : most;
  return most;
}
inline int32_t sum_lanes(VI v) {
  int32_t sum = 0;
  for (int i = 0; i < 8; ++i) sum += v[i];
  return sum;
}
inline VF at_least(VF v, VF low) { return v < low ? low : v; }
inline VF at_most(VF v, VF high) { return v > high ? high : v; }
inline VF in_order(VF v) { return v; }

// float16 by integer arithmetic, round to nearest even, for machines without a conversion instruction.
#pragma once

#include <cstdint>

namespace int8moe::portable {
namespace {

static inline float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 0x1F, fraction = h & 0x3FF, out;
  if (exponent == 0x1F) {
    out = sign | 0x7F800000 | (fraction << 13) | (fraction ? 0x400000 : 0);
  } else if (exponent) {
    out = sign | ((exponent + 112) << 23) | (fraction << 13);
  } else {  // zero or denormal: fraction * 2**-24, exact in float32
    float value = (float)fraction * 5.9604644775390625e-8f;
    __builtin_memcpy(&out, &value, 4);
    out |= sign;
  }
  float f;
  __builtin_memcpy(&f, &out, 4);
  return f;
}

static inline uint16_t float_to_half(float f) {
  uint32_t b;
  __builtin_memcpy(&b, &f, 4);
  uint16_t sign = (uint16_t)((b >> 16) & 0x8000);
  b &= 0x7FFFFFFF;
  if (b > 0x7F800000) return (uint16_t)(sign | 0x7E00);
  if (b >= 0x477FF000) return (uint16_t)(sign | 0x7C00);  // from 65520 on, the nearest is infinity
  if (b < 0x38800000) {                                   // below 2**-14: denormal or zero
    if (b < 0x33000000) return sign;                      // below 2**-25
    uint32_t shift = 126 - (b >> 23), mantissa = (b & 0x7FFFFF) | 0x800000;
    uint32_t q = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    return (uint16_t)(sign | (q + (rest > half || (rest == half && (q & 1)))));
  }
  uint32_t q = (b - 0x38000000) >> 13, rest = b & 0x1FFF;
  return (uint16_t)(sign | (q + (rest > 0x1000 || (rest == 0x1000 && (q & 1)))));
}

}  // namespace
}  // namespace int8moe::portable

// What the processor and the operating system allow, as bits.
#pragma once

#include <cstdint>

namespace int8moe {

enum Feature : uint32_t {
  kAvx2 = 1,
  kFma = 2,
  kF16c = 4,
  kAvxVnni = 8,
  kAvx512 = 16,  // F, BW, DQ and VL
  kAvx512Vnni = 32,
  kAmxInt8 = 64,  // and the process may use it
  kDotprod = 128,
  kI8mm = 256,
};

uint32_t cpu_features();
const char* feature_name(uint32_t bit);

}  // namespace int8moe

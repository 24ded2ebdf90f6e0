// What the processor and the operating system allow, as bits.
#pragma once

#include <cstdint>

namespace int8moe {

enum Feature : uint32_t { kAvx2 = 1, kFma = 2, kF16c = 4 };

uint32_t cpu_features();
const char* feature_name(uint32_t bit);

}  // namespace int8moe

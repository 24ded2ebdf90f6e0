#include "features.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

namespace int8moe {

#if defined(__x86_64__) || defined(__i386__)
static uint32_t detect() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const bool os_saves = c & (1u << 27), has_avx = c & (1u << 28);
  if (!os_saves || !has_avx) return 0;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 6) != 6) return 0;  // the operating system keeps xmm and ymm
  uint32_t found = 0;
  if (c & (1u << 12)) found |= kFma;
  if (c & (1u << 29)) found |= kF16c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 5))) found |= kAvx2;
  return found;
}
#else
static uint32_t detect() { return 0; }
#endif

uint32_t cpu_features() {
  static const uint32_t found = detect();
  return found;
}

const char* feature_name(uint32_t bit) {
  switch (bit) {
    case kAvx2:
      return "avx2";
    case kFma:
      return "fma";
    case kF16c:
      return "f16c";
  }
  return "";
}

}  // namespace int8moe

#include "features.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace int8moe {

#if defined(__x86_64__) || defined(__i386__)

// Linux hands out the large tile registers only to a process that asks.
static bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

static uint32_t detect() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const bool os_saves = c & (1u << 27), has_avx = c & (1u << 28);
  if (!os_saves || !has_avx) return 0;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 0x6) != 0x6) return 0;  // the operating system keeps xmm and ymm
  const bool keeps_zmm = (low & 0xe6) == 0xe6, keeps_tiles = (low & 0x60000) == 0x60000;
  uint32_t found = 0;
  if (c & (1u << 12)) found |= kFma;
  if (c & (1u << 29)) found |= kF16c;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  const unsigned leaves = a;
  if (b & (1u << 5)) found |= kAvx2;
  const unsigned f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  if (keeps_zmm && (b & f_dq_bw_vl) == f_dq_bw_vl) {
    found |= kAvx512;
    if (c & (1u << 11)) found |= kAvx512Vnni;
  }
  const unsigned tile_int8 = 1u << 24 | 1u << 25;
  if (keeps_tiles && (d & tile_int8) == tile_int8 && may_use_tiles()) found |= kAmxInt8;
  if (leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4))) found |= kAvxVnni;
  return found;
}

#elif defined(__aarch64__) && defined(__linux__)

static uint32_t detect() {
  uint32_t found = 0;
  if (getauxval(AT_HWCAP) & (1ul << 20)) found |= kDotprod;
  if (getauxval(AT_HWCAP2) & (1ul << 13)) found |= kI8mm;
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
    case kAvxVnni:
      return "avx_vnni";
    case kAvx512:
      return "avx512";
    case kAvx512Vnni:
      return "avx512_vnni";
    case kAmxInt8:
      return "amx_int8";
    case kDotprod:
      return "asimddp";
    case kI8mm:
      return "i8mm";
  }
  return "";
}

}  // namespace int8moe

// The compiled kernels, best first.
#pragma once

#include <cstdint>

#include "moe.h"

namespace int8moe {

struct Kernel {
  const char* name;
  uint32_t needs;  // Feature bits, all of them
  const KernelFns* fns;
};

const Kernel* kernels(int* count);
inline bool runnable(const Kernel& kernel, uint32_t features) { return (kernel.needs & ~features) == 0; }

}  // namespace int8moe

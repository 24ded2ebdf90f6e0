#include "dispatch.h"

#include "features.h"

namespace int8moe {

#ifdef INT8MOE_AVX2
namespace avx2 {
extern const KernelFns kernel;
}
#endif
namespace portable {
extern const KernelFns kernel;
}

static const Kernel kKernels[] = {
#ifdef INT8MOE_AVX2
    {"avx2", kAvx2 | kF16c, &avx2::kernel},
#endif
    {"portable", 0, &portable::kernel},
};

const Kernel* kernels(int* count) {
  *count = sizeof kKernels / sizeof kKernels[0];
  return kKernels;
}

}  // namespace int8moe

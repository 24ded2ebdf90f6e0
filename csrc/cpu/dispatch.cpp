#include "dispatch.h"

#include "features.h"

namespace int8moe {

// An ISA file that the compiler could not build is not here (CMakeLists.txt).
#ifdef INT8MOE_AMX
namespace amx {
extern const KernelFns kernel;
}
#endif
#ifdef INT8MOE_AVX512VNNI
namespace avx512vnni {
extern const KernelFns kernel;
}
#endif
#ifdef INT8MOE_AVXVNNI
namespace avxvnni {
extern const KernelFns kernel;
}
#endif
#ifdef INT8MOE_AVX2
namespace avx2 {
extern const KernelFns kernel;
}
#endif
#ifdef INT8MOE_NEON_I8MM
namespace neon_i8mm {
extern const KernelFns kernel;
}
#endif
#ifdef INT8MOE_NEON_DOTPROD
namespace neon_dotprod {
extern const KernelFns kernel;
}
#endif
namespace portable {
extern const KernelFns kernel;
}

static const Kernel kKernels[] = {
#ifdef INT8MOE_AMX
    {"amx", kAvx2 | kF16c | kAvx512 | kAvx512Vnni | kAmxInt8, &amx::kernel},
#endif
#ifdef INT8MOE_AVX512VNNI
    {"avx512vnni", kAvx2 | kF16c | kAvx512 | kAvx512Vnni, &avx512vnni::kernel},
#endif
#ifdef INT8MOE_AVXVNNI
    {"avxvnni", kAvx2 | kF16c | kAvxVnni, &avxvnni::kernel},
#endif
#ifdef INT8MOE_AVX2
    {"avx2", kAvx2 | kF16c, &avx2::kernel},
#endif
#ifdef INT8MOE_NEON_I8MM
    {"neon_i8mm", kDotprod | kI8mm, &neon_i8mm::kernel},
#endif
#ifdef INT8MOE_NEON_DOTPROD
    {"neon_dotprod", kDotprod, &neon_dotprod::kernel},
#endif
    {"portable", 0, &portable::kernel},
};

const Kernel* kernels(int* count) {
  *count = sizeof kKernels / sizeof kKernels[0];
  return kKernels;
}

}  // namespace int8moe

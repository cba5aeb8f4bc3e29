#include "reals.h"

#include "cpu.h"

namespace octet {

const RealKernels& real_kernels() {
#if defined(__x86_64__)
  return *by_isa(&kAvx512Reals, &kAvx2Reals, &kAvx2Reals, &kPortableReals);
#else
  return kPortableReals;
#endif
}

}  // namespace octet

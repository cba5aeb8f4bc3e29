#include "reals.h"

#include "cpu.h"

namespace octet {

const RealKernels& real_kernels() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAvx512Vnni:
      return kAvx512Reals;
    case Isa::kAvxVnni:
    case Isa::kAvx2:
      return kAvx2Reals;
    default:
      break;
  }
#endif
  return kPortableReals;
}

}  // namespace octet

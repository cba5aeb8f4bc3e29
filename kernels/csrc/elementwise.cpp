#include "elementwise.h"

#include "cpu.h"

namespace octet {

const ElementKernels& element_kernels() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAvx512Vnni:
      return kAvx512Elements;
    case Isa::kAvxVnni:
    case Isa::kAvx2:
      return kAvx2Elements;
    default:
      break;
  }
#endif
  return kPortableElements;
}

}  // namespace octet

#include "elementwise.h"

#include "cpu.h"

namespace octet {

const ElementKernels& element_kernels() {
#if defined(__x86_64__)
  return *by_isa(&kAvx512Elements, &kAvx2Elements, &kAvx2Elements, &kPortableElements);
#else
  return kPortableElements;
#endif
}

}  // namespace octet

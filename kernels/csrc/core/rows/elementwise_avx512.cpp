#include "core/rows/elementwise.inc"

namespace octet {

extern const ElementKernels kAvx512Elements = kElements;

}  // namespace octet

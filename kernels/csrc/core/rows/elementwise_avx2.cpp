#include "core/rows/elementwise.inc"

namespace octet {

extern const ElementKernels kAvx2Elements = kElements;

}  // namespace octet

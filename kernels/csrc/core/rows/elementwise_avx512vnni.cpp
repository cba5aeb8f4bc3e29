#include "core/rows/elementwise.inc"

namespace octet {

extern const ElementKernels kAvx512VnniElements = kElements;

}  // namespace octet

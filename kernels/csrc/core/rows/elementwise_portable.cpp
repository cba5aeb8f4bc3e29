#include "core/rows/elementwise.inc"

namespace octet {

extern const ElementKernels kPortableElements = kElements;

}  // namespace octet

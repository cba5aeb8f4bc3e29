#include "core/rows/elementwise.inc"
#include "counted.h"

namespace octet {

extern const ElementKernels kAddedElements = added::counted(kElements, &ElementKernels::add, "elementwise");

}  // namespace octet

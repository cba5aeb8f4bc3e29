// By intrinsics where the compiler alone does not find the instructions.
#define OCTET_NEON

#include "core/rows/elementwise.inc"

namespace octet {

extern const ElementKernels kNeonElements = kElements;

}  // namespace octet

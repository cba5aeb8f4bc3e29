// By intrinsics where the compiler alone does not find the instructions.
#define OCTET_NEON

#include "core/rows/rows.inc"

namespace octet {

extern const RowKernels kNeonRows = kTable;

}  // namespace octet

#include "core/rows/reals.inc"
#include "counted.h"

namespace octet {

extern const RealKernels kAddedReals = added::counted(kReals, &RealKernels::layer_norm, "reals");

}  // namespace octet

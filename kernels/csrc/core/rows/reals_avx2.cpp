#include "core/rows/reals.inc"

namespace octet {

extern const RealKernels kAvx2Reals = kReals;

}  // namespace octet

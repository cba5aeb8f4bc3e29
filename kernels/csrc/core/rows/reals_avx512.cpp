#include "core/rows/reals.inc"

namespace octet {

extern const RealKernels kAvx512Reals = kReals;

}  // namespace octet

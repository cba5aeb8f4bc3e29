#include "core/rows/reals.inc"

namespace octet {

extern const RealKernels kAvx512VnniReals = kReals;

}  // namespace octet

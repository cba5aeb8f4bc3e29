#include "core/rows/reals.inc"

namespace octet {

extern const RealKernels kPortableReals = kReals;

}  // namespace octet

#include "core/rows/rows.inc"

namespace octet {

extern const RowKernels kAvx2Rows = kTable;

}  // namespace octet

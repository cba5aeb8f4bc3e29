#include "rows.inc"

namespace octet {

extern const RowKernels kAvx2Rows = kTable;

}  // namespace octet

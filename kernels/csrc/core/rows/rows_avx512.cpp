#include "core/rows/rows.inc"

namespace octet {

extern const RowKernels kAvx512Rows = kTable;

}  // namespace octet

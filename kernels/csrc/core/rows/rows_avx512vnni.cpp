#include "core/rows/rows.inc"

namespace octet {

extern const RowKernels kAvx512VnniRows = kTable;

}  // namespace octet

#include "core/rows/rows.inc"
#include "counted.h"

namespace octet {

extern const RowKernels kAddedRows = added::counted(kTable, &RowKernels::quantize, "rows");

}  // namespace octet

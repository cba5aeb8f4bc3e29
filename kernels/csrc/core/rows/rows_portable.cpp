#include "core/rows/rows.inc"

namespace octet {

extern const RowKernels kPortableRows = kTable;

}  // namespace octet

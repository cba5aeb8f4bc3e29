#include "rows.inc"

namespace octet {

extern const RowKernels kPortableRows = kTable;

}  // namespace octet

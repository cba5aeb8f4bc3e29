// Products of narrow weights in plain C++.
#include "core/gemm/narrow_vectors_plain.h"

namespace octet {

extern const NativeNarrow kPortableNarrow = narrow_table<PortableNarrow>("unpacked");

}  // namespace octet

// Products of narrow weights by AVX-512 VNNI.
#include "core/gemm/narrow_vectors_avx512vnni.h"

namespace octet {

extern const NativeNarrow kAvx512VnniNarrow = narrow_table<Avx512VnniNarrow>("unpacked, vnni");

}  // namespace octet

// Many rows of narrow weights in the tiles of AMX; few by AVX-512 VNNI.
#include "core/gemm/narrow_tiles.h"
#include "core/gemm/narrow_vectors_avx512vnni.h"

namespace octet {

extern const NativeNarrow kAvx512VnniNarrow;
extern const NativeNarrow kAmxNarrow = amx::narrow_table<CpuTiles, Avx512VnniNarrow, kAvx512VnniNarrow>("unpacked, tiles");

}  // namespace octet

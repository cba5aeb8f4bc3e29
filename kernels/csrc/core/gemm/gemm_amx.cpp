// AMX: products of 16 rows, 64 values and 16 outputs at once, exact as those of VNNI, which takes what has few rows.
#include "core/gemm/tile_amx.h"
#include "core/gemm/vectors_avx512vnni.h"

namespace octet {

extern const NativeGemm kAvx512VnniGemm;
extern const NativeGemm kAmxGemm = amx::table<CpuTiles, Avx512, kAvx512VnniGemm>("tiles");

}  // namespace octet

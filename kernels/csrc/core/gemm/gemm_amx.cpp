// AMX: products of 16 rows, 64 values and 16 outputs at once, exact as those of VNNI, which takes what has few rows.
#if !defined(__clang__)
#pragma GCC optimize("no-tree-coalesce-vars")  // core/gemm/tile_avx512.h
#endif
#include "core/gemm/policy_avx512vnni.h"
#include "core/gemm/tile_amx.h"

namespace octet {

extern const NativeGemm kAmxGemm = amx::table<CpuTiles, Avx512Vnni>("tiles");

}  // namespace octet

// The products of AVX-512 VNNI.
#if !defined(__clang__)
#pragma GCC optimize("no-tree-coalesce-vars")  // core/gemm/tile_avx512.h
#endif
#include "core/gemm/policy_avx512vnni.h"

namespace octet {

extern const NativeGemm kAvx512VnniGemm = tile::table_with_pieces<Avx512Vnni>("vnni");

}  // namespace octet

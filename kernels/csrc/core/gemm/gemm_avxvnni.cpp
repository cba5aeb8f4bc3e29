// AVX-VNNI: the 256-bit vpdpbusd of client CPUs, exact as its 512-bit twin.
#include "core/gemm/native_gemm.h"
#include "core/gemm/tile_pieces.h"
#include "core/gemm/vectors_avxvnni.h"

namespace octet {

extern const NativeGemm kAvxVnniGemm = tile::table_with_pieces<AvxVnni>("vnni");

}  // namespace octet

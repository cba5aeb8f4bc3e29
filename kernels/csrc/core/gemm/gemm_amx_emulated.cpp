// The products of AMX over emulated tiles, on any CPU: for tests of the code that gemm_amx.cpp runs on the CPU's own.
#include "core/gemm/tile_amx.h"
#include "core/gemm/vectors_plain.h"

namespace octet {

extern const NativeGemm kAmxEmulatedGemm = amx::table<EmulatedTiles, Plain>("emulated tiles");

}  // namespace octet

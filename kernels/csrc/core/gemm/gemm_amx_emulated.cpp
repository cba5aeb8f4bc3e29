// The products of AMX over emulated tiles, on any CPU: for tests of the code that gemm_amx.cpp runs on the CPU's own.
#include "core/gemm/tile_amx.h"
#include "core/gemm/tile_pieces.h"
#include "core/gemm/vectors_plain.h"

namespace octet {
namespace {

constexpr NativeGemm kPlainGemm = tile::table_with_pieces<Plain>("plain vectors");

}  // namespace

extern const NativeGemm kAmxEmulatedGemm = amx::table<EmulatedTiles, Plain, kPlainGemm>("emulated tiles");

}  // namespace octet

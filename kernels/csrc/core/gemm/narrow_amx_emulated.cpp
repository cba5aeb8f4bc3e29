// The same over emulated tiles, on any CPU: for tests of the code that narrow_amx.cpp runs on the CPU's own.
#include "core/gemm/narrow_tiles.h"
#include "core/gemm/narrow_vectors_plain.h"

namespace octet {

extern const NativeNarrow kPortableNarrow;
extern const NativeNarrow kAmxEmulatedNarrow =
    amx::narrow_table<EmulatedTiles, PortableNarrow, kPortableNarrow>("unpacked, emulated tiles");

}  // namespace octet

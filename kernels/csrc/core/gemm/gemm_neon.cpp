#include "core/gemm/neon_wide.h"

namespace octet {

extern const NativeGemm kNeonGemm = tile::table<NeonWide<int8_t>>("wide");

}  // namespace octet

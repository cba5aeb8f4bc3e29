// Winograd's algorithm on NEON without dot products, whose convolutions multiply pairs of int16 too: a quarter of them is what is
// saved. With dot products a convolution has four times as many products an instruction, which is all that there is to save.
#include "core/conv/native_winograd.h"
#include "core/conv/winograd_loop.h"
#include "core/gemm/neon_wide.h"

namespace octet {
namespace {

struct Winograd {
  using Gemm = NeonWide<int16_t>;
  static constexpr int kBytes = 16;
};

}  // namespace

extern const NativeWinograd kNeonWinograd = winograd::table<Winograd>();

}  // namespace octet

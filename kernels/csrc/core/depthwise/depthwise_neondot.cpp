// Depthwise convolution by the dot product of ARMv8.2, which takes signed bytes only: activations are read as x - 128, which is x
// with its top bit turned over.
#include "core/depthwise/depthwise_neon.h"

namespace octet {
namespace depthwise {
namespace {

struct Dots : Vec16 {
  static constexpr bool kCentred = true;
  static int8x16_t dots(Acc lanes) { return vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_s32(lanes), vdupq_n_u8(128))); }
  static Acc dot(Acc sum, int8x16_t x, Weight w) { return vdotq_s32(sum, x, w); }
};

}  // namespace
}  // namespace depthwise

extern const NativeDepthwise kNeonDotDepthwise = depthwise::table<depthwise::Dots>();

}  // namespace octet

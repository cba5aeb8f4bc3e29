// Depthwise convolution by the mixed dot product of ARMv8.6, which takes activations as the unsigned bytes that they are.
#include "core/depthwise/depthwise_neon.h"

namespace octet {
namespace depthwise {
namespace {

struct Dots : Vec16 {
  static uint8x16_t dots(Acc lanes) { return vreinterpretq_u8_s32(lanes); }
  static Acc dot(Acc sum, uint8x16_t x, Weight w) { return vusdotq_s32(sum, x, w); }
};

}  // namespace
}  // namespace depthwise

extern const NativeDepthwise kNeonI8mmDepthwise = depthwise::table<depthwise::Dots>();

}  // namespace octet

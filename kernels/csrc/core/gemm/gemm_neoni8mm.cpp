// The mixed dot product of ARMv8.6: sudot takes activations as the unsigned bytes that they are.
#include "core/gemm/neon_dot.h"

namespace octet {
namespace {

struct NeonI8mm : ByLane<NeonI8mm> {
  static constexpr int kHead = 0;
  static uint8x16_t activations(uint8x16_t x) { return x; }
  template <int lane>
  static int32x4_t dot(int32x4_t sum, int8x16_t w, uint8x16_t x) {
    return vsudotq_laneq_s32(sum, w, x, lane);
  }
};

}  // namespace

extern const NativeGemm kNeonI8mmGemm = tile::table<NeonI8mm>("mixed dot");

}  // namespace octet

// The dot product of ARMv8.2: sdot takes signed bytes only, so activations are read as x - 128, which is x with its top
// bit turned over, and every sum starts from 128 * row_sum, which makes up for it exactly: both fit int32 (packed_gemm.h).
#include "core/gemm/neon_dot.h"

namespace octet {
namespace {

struct NeonDot : ByLane<NeonDot> {
  static constexpr int kHead = sizeof(int32_t);
  static uint8x16_t activations(uint8x16_t x) { return veorq_u8(x, vdupq_n_u8(128)); }
  template <int lane>
  static int32x4_t dot(int32x4_t sum, int8x16_t w, uint8x16_t x) {
    return vdotq_laneq_s32(sum, w, vreinterpretq_s8_u8(x), lane);
  }
};

}  // namespace

extern const NativeGemm kNeonDotGemm = tile::table<NeonDot>("dot");

}  // namespace octet

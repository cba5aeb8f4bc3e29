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

  static void pack(const int8_t* weight, int64_t n, int64_t k, int8_t* packed) {
    const int64_t longer = k + kHead;
    FileBuffer<int8_t> buffer;
    int8_t* const rows = buffer.get(n * longer);
    for (int64_t j = 0; j < n; ++j) {
      int32_t start = 0;
      for (int64_t i = 0; i < k; ++i) start += 128 * weight[j * k + i];
      std::memcpy(rows + j * longer, &start, sizeof start);
      std::copy(weight + j * k, weight + (j + 1) * k, rows + j * longer + kHead);
    }
    tile::pack<NeonDot>(rows, n, longer, packed);
  }
};

}  // namespace

extern const NativeGemm kNeonDotGemm = {"dot",         tile::kGroup<NeonDot>, &NeonDot::packed_bytes, &NeonDot::pack,
                                        &NeonDot::run, &NeonDot::run_u8,       &NeonDot::run_f32,     nullptr, nullptr, nullptr, nullptr};

}  // namespace octet

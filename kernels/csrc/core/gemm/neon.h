// What the NEON kernels of all three instruction sets share: equation 7 on vectors, and names for their tiles.
#pragma once

#include <arm_neon.h>

#include <utility>

#include "core/gemm/tile.h"

namespace octet {
namespace {

// Four sums to whole numbers in the range of a byte, clamped before the zero point is added, where all still is float:
// rounding keeps whole numbers apart. vcvtn rounds half to even whatever the rounding mode.
struct RoundingNeon {
  float32x4_t low, high;
  int32x4_t zero_point;
  explicit RoundingNeon(const Requantize& by)
      : low(vdupq_n_f32(static_cast<float>(by.bottom - by.zero_point))),
        high(vdupq_n_f32(static_cast<float>(by.top - by.zero_point))),
        zero_point(vdupq_n_s32(by.zero_point)) {}
  int32x4_t operator()(int32x4_t sum, const int32_t* offset, const float* multiplier) const {
    const float32x4_t real = vmulq_f32(vcvtq_f32_s32(vaddq_s32(sum, vld1q_s32(offset))), vld1q_f32(multiplier));
    return vaddq_s32(vcvtnq_s32_f32(vminq_f32(vmaxq_f32(real, low), high)), zero_point);
  }
};

inline uint8x8_t bytes_of(int32x4_t first, int32x4_t second) {
  return vqmovun_s16(vcombine_s16(vmovn_s32(first), vmovn_s32(second)));
}

// `Vectors` of 4 sums to bytes; an odd one out leaves 4.
template <int Vectors>
inline void requantize_neon(const int32_t* sums, const int32_t* offset, const float* multiplier,
                            const RoundingNeon& rounding, uint8_t* out) {
  const auto whole = [&](int v) { return rounding(vld1q_s32(sums + 4 * v), offset + 4 * v, multiplier + 4 * v); };
  for (int v = 0; v + 1 < Vectors; v += 2) vst1_u8(out + 4 * v, bytes_of(whole(v), whole(v + 1)));
  if constexpr (Vectors % 2) {
    const uint8x8_t last = bytes_of(whole(Vectors - 1), whole(Vectors - 1));
    vst1_lane_u32(reinterpret_cast<uint32_t*>(out + 4 * (Vectors - 1)), vreinterpret_u32_u8(last), 0);
  }
}

}  // namespace
}  // namespace octet

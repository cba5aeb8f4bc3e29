// What the NEON kernels of all three instruction sets share: equation 7 on vectors, and names for their tiles.
#pragma once

#include <arm_neon.h>

#include <utility>

#include "core/gemm/tile.h"
#include "core/rows/rounding_neon.h"

namespace octet {
namespace {

using RoundingNeon = BytesNeon;

// Up to four vectors of 4 sums to bytes.
template <int Vectors>
inline void requantize_neon(const int32_t* sums, const int32_t* offset, const float* multiplier,
                            const RoundingNeon& rounding, uint8_t* out) {
  static_assert(Vectors <= 4);
  const auto whole = [&](int v) {
    const int at = v < Vectors ? 4 * v : 0;
    return scaled_neon(vaddq_s32(vld1q_s32(sums + at), vld1q_s32(offset + at)), vld1q_f32(multiplier + at));
  };
  const uint8x16_t q = rounding(whole(0), whole(1), whole(2), whole(3));
  if constexpr (Vectors == 4) return vst1q_u8(out, q);
  if constexpr (Vectors >= 2) vst1_u8(out, vget_low_u8(q));
  if constexpr (Vectors % 2)
    vst1q_lane_u32(reinterpret_cast<uint32_t*>(out + 4 * (Vectors - 1)), vreinterpretq_u32_u8(q), Vectors - 1);
}

}  // namespace
}  // namespace octet

// Whole numbers to bytes on NEON, for the kernels of several rooms.
#pragma once

#include <arm_neon.h>

#include "core/rows/requantize.h"

namespace octet {
namespace {

// Zero point and clamps of sixteen whole numbers, which are what vcvtn makes of reals: it rounds half to even whatever the
// rounding mode, saturates, and makes 0 of NaN. The packs saturate too, so the zero point is added as int16, to eight at a time:
// what leaves int16 on the way lies outside of a byte with any zero point.
struct BytesNeon {
  int16x8_t zero_point;
  uint8x16_t bottom, top;
  BytesNeon(int32_t zero_point, int32_t bottom, int32_t top)
      : zero_point(vdupq_n_s16(static_cast<int16_t>(zero_point))),
        bottom(vdupq_n_u8(static_cast<uint8_t>(bottom))),
        top(vdupq_n_u8(static_cast<uint8_t>(top))) {}
  explicit BytesNeon(const Requantize& by) : BytesNeon(by.zero_point, by.bottom, by.top) {}

  uint8x16_t operator()(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) const {
    const int16x8_t first = vqaddq_s16(vqmovn_high_s32(vqmovn_s32(a), b), zero_point);
    const int16x8_t second = vqaddq_s16(vqmovn_high_s32(vqmovn_s32(c), d), zero_point);
    return vminq_u8(vmaxq_u8(vqmovun_high_s16(vqmovun_s16(first), second), bottom), top);
  }
};

// Four sums with their offset to whole numbers.
inline int32x4_t scaled_neon(int32x4_t sums, float32x4_t multiplier) {
  return vcvtnq_s32_f32(vmulq_f32(vcvtq_f32_s32(sums), multiplier));
}

}  // namespace
}  // namespace octet

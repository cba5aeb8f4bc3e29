// Vectors of 16 bytes for depthwise_loop.h, less the products: those differ with the instruction set.
#pragma once

#include <arm_neon.h>

#include "core/depthwise/depthwise_loop.h"
#include "core/rows/rounding_neon.h"

namespace octet::depthwise {
namespace {

struct Vec16 {
  using Acc = int32x4_t;
  using Weight = int8x16_t;
  using Rounding = BytesNeon;
  // 12 weights of a 3 x 3 kernel beside 12 sums, four lanes and what is interleaved: all 32 registers.
  static constexpr int kWidth = 16, kDotBytes = kWidth, kHeldWeights = 12;
  static Acc load(const void* x) { return vld1q_s32(static_cast<const int32_t*>(x)); }
  template <int Parts>
  static Acc gather(const uint8_t* x, int64_t step) {
    static_assert(Parts == 2);
    return vreinterpretq_s32_u8(vcombine_u8(vld1_u8(x), vld1_u8(x + step)));
  }
  static Acc constant(const int32_t* lanes) { return load(lanes); }
  static Acc low8(Acc a, Acc b) { return vreinterpretq_s32_s8(vzip1q_s8(vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b))); }
  static Acc high8(Acc a, Acc b) { return vreinterpretq_s32_s8(vzip2q_s8(vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b))); }
  static Acc low16(Acc a, Acc b) {
    return vreinterpretq_s32_s16(vzip1q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
  }
  static Acc high16(Acc a, Acc b) {
    return vreinterpretq_s32_s16(vzip2q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
  }
  static Weight weight(const int8_t* w) { return vld1q_s8(w); }
  static void pack_weight(const int8_t (&taps)[4], int lane, int8_t* packed) {
    for (int i = 0; i < 4; ++i) packed[lane * 4 + i] = taps[i];
  }
  static uint8x16_t finish(const Acc (&sums)[4], const float* multiplier, const Rounding& rounding) {
    const auto whole = [&](int b) { return scaled_neon(sums[b], vld1q_f32(multiplier + 4 * b)); };
    return rounding(whole(0), whole(1), whole(2), whole(3));
  }
  static void store(uint8_t* out, uint8x16_t bytes) { vst1q_u8(out, bytes); }
};

}  // namespace
}  // namespace octet::depthwise

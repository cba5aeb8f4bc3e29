// NEON of every 64-bit ARM: both operands as int16, exact for every weight.
#pragma once

#include <cstring>
#include <type_traits>

#include "core/gemm/neon.h"

namespace octet {
namespace {

// Products of activations by weights of kind Value, each added to its own int32. Weights of int16 lie as two bytes a step, and
// their activations as bytes of rows of int16.
template <class Value>
struct NeonWide {
  static constexpr bool kBytes = sizeof(Value) == 1;
  using X = std::conditional_t<kBytes, uint16_t, uint8_t>;
  using Rounding = RoundingNeon;
  static constexpr int kLanes = 8, kStep = sizeof(Value), kBlocks = 2, kRows = 4;

  template <int Blocks>
  static void requantize(const int32_t* sums, const int32_t* offset, const float* multiplier, const Rounding& rounding,
                         uint8_t* out) {
    requantize_neon<2 * Blocks>(sums, offset, multiplier, rounding, out);
  }

  static constexpr int kAdvance = sizeof(int16_t) / sizeof(X);
  static int16x8_t weights(const int8_t* w) {
    if constexpr (kBytes)
      return vmovl_s8(vld1_s8(w));
    else
      return vreinterpretq_s16_s8(vld1q_s8(w));
  }
  static int16x8_t eight(const X* x) { return vld1q_s16(reinterpret_cast<const int16_t*>(x)); }
  static int16x8_t one(const X* x) {
    int16_t value;
    std::memcpy(&value, x, sizeof value);
    return vdupq_n_s16(value);
  }

#define OCTET_UNROLL _Pragma("GCC unroll 16")

  // smlal takes its activation from a lane, so eight of a row are loaded at once.
  template <int M, int B>
  static void tile(const X* x, int64_t ldx, const int8_t* w, int64_t steps, int32_t* acc, int64_t ldacc) {
    int32x4_t sums[M][B][2];
    OCTET_UNROLL
    for (int m = 0; m < M; ++m)
      OCTET_UNROLL
      for (int b = 0; b < B; ++b) sums[m][b][0] = sums[m][b][1] = vdupq_n_s32(0);
    int16x8_t xs[M];
    const auto add_step = [&]<int lane>(std::integral_constant<int, lane>) __attribute__((always_inline)) {
      OCTET_UNROLL
      for (int b = 0; b < B; ++b) {
        const int16x8_t wb = weights(w + b * kLanes * kStep);
        OCTET_UNROLL
        for (int m = 0; m < M; ++m) {
          sums[m][b][0] = vmlal_laneq_s16(sums[m][b][0], vget_low_s16(wb), xs[m], lane);
          sums[m][b][1] = vmlal_high_laneq_s16(sums[m][b][1], wb, xs[m], lane);
        }
      }
      w += B * kLanes * kStep;
    };
    for (; steps >= 8; steps -= 8, x += 8 * kAdvance) {
      OCTET_UNROLL
      for (int m = 0; m < M; ++m) xs[m] = eight(x + m * ldx);
      [&]<int... lane>(std::integer_sequence<int, lane...>) __attribute__((always_inline)) {
        (add_step(std::integral_constant<int, lane>()), ...);
      }(std::make_integer_sequence<int, 8>());
    }
    for (; steps > 0; --steps, x += kAdvance) {
      OCTET_UNROLL
      for (int m = 0; m < M; ++m) xs[m] = one(x + m * ldx);
      add_step(std::integral_constant<int, 0>());
    }
    OCTET_UNROLL
    for (int m = 0; m < M; ++m)
      OCTET_UNROLL
      for (int b = 0; b < B; ++b)
        for (int half = 0; half < 2; ++half)
          vst1q_s32(acc + m * ldacc + b * kLanes + half * 4, sums[m][b][half]);
  }

#undef OCTET_UNROLL
};

}  // namespace
}  // namespace octet

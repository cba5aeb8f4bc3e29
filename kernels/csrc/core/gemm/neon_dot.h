// The tile for dot products by lane: sdot and sudot multiply 16 weights, four of each of four outputs, by the four
// activations in one lane of a register. So 16 activations of a row are loaded at once, and no instruction is spent on
// repeating them; with a broadcast for every four, loads would take as long as products.
//
// A `Dot` says: kHead (bytes in front of each output's weights), activations (what 16 of them become before they are
// multiplied) and dot. With kHead 4 these bytes are an int32, from which the output's sums start.
#pragma once

#include "core/gemm/neon.h"

namespace octet {
namespace {

// Weights are loaded where they are used: g++ 12 would load those of all steps of a loop first, and keep accumulators in
// memory for want of registers.
inline const int8_t* not_earlier(const int8_t* w) {
  asm("" : "+r"(w));
  return w;
}

template <class Dot>
struct ByLane {
  using X = uint8_t;
  using Rounding = RoundingNeon;
  static constexpr int kLanes = 4, kStep = 4, kBlocks = 4, kRows = 4;

  template <int Blocks>
  static void requantize(const int32_t* sums, const int32_t* offset, const float* multiplier, const Rounding& rounding,
                         uint8_t* out) {
    requantize_neon<Blocks>(sums, offset, multiplier, rounding, out);
  }

#define OCTET_UNROLL _Pragma("GCC unroll 16")

  template <int M, int B>
  static void tile(const uint8_t* x, int64_t ldx, const int8_t* w, int64_t steps, int32_t* acc, int64_t ldacc) {
    // One row has too few sums to cover the latency: odd steps get their own.
    constexpr int kSets = M == 1 ? 2 : 1;
    int32x4_t sums[kSets][M][B];
    OCTET_UNROLL
    for (int b = 0; b < B; ++b) {
      const int32x4_t start = Dot::kHead ? vreinterpretq_s32_s8(vld1q_s8(w + b * 16)) : vdupq_n_s32(0);
      OCTET_UNROLL
      for (int m = 0; m < M; ++m) sums[0][m][b] = start;
      if constexpr (kSets == 2) sums[1][0][b] = vdupq_n_s32(0);
    }
    w += Dot::kHead * B * kLanes;
    steps -= Dot::kHead / kStep;
    uint8x16_t xs[M];
    const auto add_step = [&]<int lane>(std::integral_constant<int, lane>) __attribute__((always_inline)) {
      OCTET_UNROLL
      for (int b = 0; b < B; ++b) {
        const int8x16_t wb = vld1q_s8(w + b * 16);
        OCTET_UNROLL
        for (int m = 0; m < M; ++m) {
          int32x4_t& sum = sums[lane % kSets][m][b];
          sum = Dot::template dot<lane>(sum, wb, xs[m]);
        }
      }
      w = not_earlier(w + B * 16);
    };
    for (; steps >= 4; steps -= 4, x += 16) {
      OCTET_UNROLL
      for (int m = 0; m < M; ++m) xs[m] = Dot::activations(vld1q_u8(x + m * ldx));
      add_step(std::integral_constant<int, 0>());
      add_step(std::integral_constant<int, 1>());
      add_step(std::integral_constant<int, 2>());
      add_step(std::integral_constant<int, 3>());
    }
    for (; steps > 0; --steps, x += 4) {
      OCTET_UNROLL
      for (int m = 0; m < M; ++m) {
        uint32_t four;
        std::memcpy(&four, x + m * ldx, sizeof four);
        xs[m] = Dot::activations(vreinterpretq_u8_u32(vdupq_n_u32(four)));
      }
      add_step(std::integral_constant<int, 0>());
    }
    OCTET_UNROLL
    for (int m = 0; m < M; ++m)
      OCTET_UNROLL
      for (int b = 0; b < B; ++b) {
        int32x4_t sum = sums[0][m][b];
        if constexpr (kSets == 2) sum = vaddq_s32(sum, sums[1][m][b]);
        vst1q_s32(acc + m * ldacc + b * kLanes, sum);
      }
  }

#undef OCTET_UNROLL
};

}  // namespace
}  // namespace octet

// The tiles' vectors in plain C++: an `Arch` of tile.h as wide as that of AVX-512, for any CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/rows/requantize.h"
#include "core/rows/wrapping.h"

namespace octet {
namespace {

struct Plain {
  using X = uint8_t;
  using Weight = const int8_t*;
  using Activation = const X*;
  static constexpr int kLanes = 16, kStep = 4, kBlocks = 4, kRows = 4, kAccSets = 1;
  struct Acc {
    int32_t lanes[kLanes] = {};
  };
  static Acc zero() { return {}; }
  static Weight load(const int8_t* w) { return w; }
  static Activation broadcast(const X* x) { return x; }
  static Acc dot(Acc a, Activation x, Weight w) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < kStep; ++i) a.lanes[lane] += static_cast<int32_t>(x[i]) * w[lane * kStep + i];
    return a;
  }
  static Acc add(Acc a, const Acc& b) {
    for (int lane = 0; lane < kLanes; ++lane) a.lanes[lane] += b.lanes[lane];
    return a;
  }
  static void store(int32_t* out, const Acc& a) { std::copy_n(a.lanes, kLanes, out); }

  // Equation 7 as kernels/reference.py has it.
  using Rounding = Requantize;
  template <int Blocks>
  static void requantize(const int32_t* sums, const int32_t* offset, const float* multiplier, const Rounding& by,
                         uint8_t* out) {
    for (int j = 0; j < Blocks * kLanes; ++j) {
      const float real = static_cast<float>(wrapped_sum(sums[j], offset[j])) * multiplier[j];
      const float q = std::nearbyint(real) + static_cast<float>(by.zero_point);
      out[j] = static_cast<uint8_t>(std::clamp(q, static_cast<float>(by.bottom), static_cast<float>(by.top)));
    }
  }

  // Elementwise additions as kernels/reference_ops.py has them, of own bytes as `a`.
  struct Adding {
    Requantize own;
    AddSettings settings;
  };
  template <int Blocks>
  static void requantize_and_add(const int32_t* sums, const int32_t* offset, const float* multiplier, const Adding& adding,
                                 const uint8_t* other, int64_t columns, uint8_t* out) {
    const AddSettings& s = adding.settings;
    uint8_t own[Blocks * kLanes];
    requantize<Blocks>(sums, offset, multiplier, adding.own, own);
    for (int64_t j = 0; j < columns; ++j) {
      const float left = static_cast<float>(own[j] - s.a_zero) * s.a_multiplier;
      const float right = static_cast<float>(other[j] - s.b_zero) * s.b_multiplier;
      const float q = std::nearbyint(left + right) + static_cast<float>(s.zero_point);
      out[j] = static_cast<uint8_t>(std::clamp(q, static_cast<float>(s.bottom), static_cast<float>(s.top)));
    }
  }
};

}  // namespace
}  // namespace octet

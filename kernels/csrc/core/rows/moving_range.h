// The range that training follows: a moving average of each batch's extremes, and the integers' parameters that fit it.
#pragma once

#include <cstdint>
#include <optional>

namespace octet {

struct MovingRange {
  double momentum;
  float low, high;  // of the clamp before; infinite where there is none
  int64_t quant_min, quant_max;
  std::optional<int64_t> middle;  // the zero point of a symmetric range
  float *average_low, *average_high;  // of all batches so far; low > high where none had a finite value
  int64_t* batches;
};

struct NonFinite {
  int64_t nan = 0, inf = 0;
};

// Takes x (n,), clamped, into the average; returns how many of the clamped values were left out.
NonFinite follow(const float* x, int64_t n, const MovingRange& range);

// Equations 3 and 4 of the average, widened to hold 0; a scale of NaN where there is none.
void choose_scale(const MovingRange& range, float* scale, int32_t* zero_point);

}  // namespace octet

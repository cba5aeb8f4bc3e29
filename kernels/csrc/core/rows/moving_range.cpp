#include "core/rows/moving_range.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "core/cpu/threads.h"
#include "core/rows/wrapping.h"
#include "core/rows/rows.h"

namespace octet {
namespace {

constexpr int64_t kGrain = 32768;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLeastScale = 0x1p-126f;

struct Ends {
  float low = kInfinity, high = -kInfinity;
};

// A clamp keeps the order, so the ends can be clamped in place of the values.
Ends clamped(Ends ends, const MovingRange& range) {
  return {std::min(std::max(ends.low, range.low), range.high), std::min(std::max(ends.high, range.low), range.high)};
}

bool all_finite(const float* x, int64_t n, Ends& ends) {
  bool finite = true;
  std::mutex merging;
  each_range(n, kGrain, [&](int64_t begin, int64_t end) {
    Ends mine;
    const bool all = row_kernels().extremes(x + begin, 1, end - begin, &mine.low, &mine.high, nullptr);
    const std::lock_guard lock(merging);
    finite &= all;
    ends = {std::min(ends.low, mine.low), std::max(ends.high, mine.high)};
  });
  return finite;
}

// Value by value: the clamp may make an infinity finite.
NonFinite look_at_each(const float* x, int64_t n, const MovingRange& range, Ends& ends) {
  NonFinite left_out;
  ends = {};
  for (int64_t i = 0; i < n; ++i) {
    const float v = std::isnan(x[i]) ? x[i] : std::min(std::max(x[i], range.low), range.high);
    if (std::isfinite(v))
      ends = {std::min(ends.low, v), std::max(ends.high, v)};
    else
      ++(std::isnan(v) ? left_out.nan : left_out.inf);
  }
  return left_out;
}

// The average's first batch sets it.
void take_in(float newest, float before, float after, float* average) {
  *average = std::isinf(*average) ? newest : *average * before + newest * after;
}

}  // namespace

NonFinite follow(const float* x, int64_t n, const MovingRange& range) {
  Ends ends;
  NonFinite left_out;
  if (n > 0 && all_finite(x, n, ends))
    ends = clamped(ends, range);
  else
    left_out = look_at_each(x, n, range, ends);
  if (ends.low > ends.high) return left_out;
  // As torch: 1 - momentum in double, then the products in float32.
  const float before = static_cast<float>(1.0 - range.momentum), after = static_cast<float>(range.momentum);
  take_in(ends.low, before, after, range.average_low);
  take_in(ends.high, before, after, range.average_high);
  add_to(*range.batches, 1);
  return left_out;
}

void choose_scale(const MovingRange& range, float* scale, int32_t* zero_point) {
  const bool empty = *range.average_low > *range.average_high;
  const float low = std::min(*range.average_low, 0.0f), high = std::max(*range.average_high, 0.0f);
  const float bottom = static_cast<float>(range.quant_min), top = static_cast<float>(range.quant_max);
  if (range.middle) {
    const int64_t middle = *range.middle;
    const float steps = static_cast<float>(std::min(range.quant_max - middle, middle - range.quant_min));
    *scale = std::max(std::max(-low, high) / steps, kLeastScale);
    *zero_point = static_cast<int32_t>(middle);
  } else {
    const float steps = top - bottom;
    *scale = std::max(high / steps - low / steps, kLeastScale);
    const float point = bottom - std::nearbyint(low * (1.0f / *scale));
    *zero_point = static_cast<int32_t>(std::clamp(point, bottom, top));
  }
  if (empty) *scale = std::numeric_limits<float>::quiet_NaN();
}

}  // namespace octet

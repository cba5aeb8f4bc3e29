#include "core/rows/rows.h"

#include <cmath>
#include <limits>

namespace octet {

RowRange choose_range(float low, float high, bool finite, int top) {
  if (!finite) return {std::numeric_limits<float>::quiet_NaN(), 0};
  constexpr float smallest = 0x1p-126f;
  const float steps = static_cast<float>(top);
  float scale = high / steps - low / steps;
  scale = scale > smallest ? scale : smallest;
  float zero_point = 0.0f - std::nearbyint(low * (1.0f / scale));
  zero_point = zero_point > 0.0f ? zero_point : 0.0f;
  zero_point = zero_point < steps ? zero_point : steps;
  return {scale, static_cast<int32_t>(zero_point)};
}

}  // namespace octet

#include "core/rows/elementwise.h"

#include <algorithm>
#include <cmath>

namespace octet {

bool AddSettings::fits() const { return 255.0f * (std::abs(a_multiplier) + std::abs(b_multiplier)) < 1e9f; }

void RescaleSettings::fill_table() {
  for (int q = 0; q < 256; ++q) {
    const float scaled = std::nearbyint(static_cast<float>(q - x_zero) * multiplier) + static_cast<float>(zero_point);
    table[q] = static_cast<uint8_t>(std::clamp(scaled, 0.0f, 255.0f));
  }
}

}  // namespace octet

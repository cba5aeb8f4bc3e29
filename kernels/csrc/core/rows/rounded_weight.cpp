#include "core/rows/rounded_weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/cpu/threads.h"
#include "core/rows/rows.h"

namespace octet {
namespace {

constexpr int64_t kValuesPerThread = 1 << 15;
constexpr float kLeastScale = 0x1p-126f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The bits of a magnitude are ordered as it is, with infinity and then NaN on top.
float largest_magnitude(const float* x, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    most = std::max(most, bits & 0x7fffffff);
  }
  float magnitude;
  std::memcpy(&magnitude, &most, sizeof magnitude);
  return magnitude;
}

// The larger one, NaN where either is.
float larger(float a, float b) { return std::isnan(a) || a > b ? a : b; }

float scale_of(const WeightRows& rows, int64_t row, const float* values) {
  const float bound = largest_magnitude(values, rows.n);
  const float scale = bound == 0.0f ? 1.0f : larger(bound / static_cast<float>(rows.quant_max), kLeastScale);
  return rows.bias ? larger(scale, std::abs(rows.bias[row]) / rows.largest_bias / rows.input_scale) : scale;
}

}  // namespace

void round_weight(const WeightRows& rows, float* out, float* scale) {
  const float top = static_cast<float>(rows.quant_max);
  each_range(rows.rows, std::max<int64_t>(1, kValuesPerThread / std::max<int64_t>(1, rows.n)), [&](int64_t begin, int64_t end) {
    std::vector<float> folded(rows.gain ? rows.n : 0);
    for (int64_t row = begin; row < end; ++row) {
      const float* values = rows.weight + row * rows.n;
      if (rows.gain) {
        for (int64_t i = 0; i < rows.n; ++i) folded[i] = values[i] * rows.gain[row];
        values = folded.data();
      }
      scale[row] = scale_of(rows, row, values);
      row_kernels().fake_quantize(values, rows.n, {scale[row], 0.0f, -top, top, -kInfinity, kInfinity}, out + row * rows.n,
                                  nullptr);
    }
  });
}

}  // namespace octet

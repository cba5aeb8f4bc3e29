// Quantise-dequantise in one pass over memory, for training: plain torch needs eight.
#pragma once

#include <cstdint>

namespace octet {

// Per tensor, or per channel: a row is what has one scale and lies in one piece, `inner` values, and its channel is the row's
// number modulo `channels`.
struct FakeQuantization {
  const float* scale;         // (channels,)
  const int32_t* zero_point;  // (channels,)
  int64_t channels, inner;
  int64_t quant_min, quant_max;
  double low, high;  // of the clamp before; infinite where there is none
};

// out (n,) = x quantised and dequantised; `inside` (n,), which may be null: true where rounding, not clamping, decided.
void fake_quantize(const FakeQuantization& by, const float* x, int64_t n, float* out, bool* inside);

// out (n,) = grad where `inside`, else 0.
void masked_gradient(const float* grad, const bool* inside, int64_t n, float* out);

}  // namespace octet

// A weight in training: scaled by what a batch norm folds into it, rounded per output channel, and back in float.
#pragma once

#include <cstdint>

namespace octet {

struct WeightRows {
  const float* weight;  // (rows, n)
  int64_t rows, n;
  const float* gain;   // (rows,), which multiplies the rows; may be null
  const float* bias;   // (rows,), for which the scale leaves room; may be null
  float input_scale;   // of the layer's input, for the bias
  float largest_bias;  // in steps of input_scale * scale
  int64_t quant_max;   // the integers are [-quant_max, quant_max]
};

// out (rows, n) = dequantize(quantize(weight * gain)); scale (rows,), which is not finite where the row is not.
void round_weight(const WeightRows& rows, float* out, float* scale);

}  // namespace octet

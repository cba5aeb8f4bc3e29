// Whole layers over any PackedGemm: quantise rows, multiply, bring the sums back to reals. No tensors here.
#pragma once

#include <cstdint>

#include "core/gemm/packed_gemm.h"
#include "core/rows/elementwise.h"
#include "core/rows/rows.h"

namespace octet {

struct Linear {
  const PackedGemm* gemm;
  const float* scale;    // (n,), of the weight; null of a GroupedGemm
  const float* bias;     // (n,) or null
  const float* columns;  // (k,) or null: x is multiplied by it before it is quantised
  int bits;              // 8 or 16, of the activations
  bool per_row;          // a range per row, or one for all rows
  bool relu;
};

// y (m, n) = x (m, k) @ weight' + bias, the activations quantised on the way; x has row stride ldx.
void linear_dynamic(const Linear& layer, const float* x, int64_t ldx, int64_t m, float* y);

// Where static sums go: exactly one of the three outputs is set.
struct StaticOutput {
  int32_t* sums = nullptr;      // zero point removed, bias added
  float* reals = nullptr;       // sums * multiplier
  uint8_t* quantized = nullptr;  // equation 7
  const float* multiplier = nullptr;  // (n,)
  int32_t zero_point = 0, bottom = 0, top = 255;
  const Residual* residual = nullptr;  // of `quantized`; of a convolution
  // Of a convolution's `reals`: 0 where channels lie side by side, else the values of a channel, which lie side by side then.
  int64_t plane = 0;
};

// An output to uint8 whose pointers are yet to be set. Raises std::invalid_argument where these are no integers of [0, 255], or
// bottom is above top.
StaticOutput requantized_output(int64_t zero_point, int64_t bottom, int64_t top);

// q_x (m, k) uint8, contiguous; bias int32 (n,) or null.
void linear_static(const PackedGemm& gemm, const uint8_t* q_x, int32_t zero_point, int64_t m, const int32_t* bias,
                   const StaticOutput& output);

// y (m, n) float32 = the sums of q_x (m, k) as reals, plus a float bias (n,) or null (equation 6 with one range).
void linear_reals(const PackedGemm& gemm, const uint8_t* q_x, int64_t m, RowRange range, const float* scale,
                  const float* bias, float* y);

}  // namespace octet

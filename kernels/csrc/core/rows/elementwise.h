// Elementwise operations between layers, on rows of bytes: one table per instruction set, all compiled from elementwise.inc
// without contraction to FMA, so that all tables give the bits of kernels/reference_ops.py.
#pragma once

#include <cstdint>

#include "core/rows/binary.h"

namespace octet {

// round((a - a_zero) * a_multiplier + (b - b_zero) * b_multiplier) + zero_point, in [bottom, top].
struct AddSettings {
  int32_t a_zero, b_zero;
  float a_multiplier, b_multiplier;
  int32_t zero_point, bottom, top;

  bool fits() const;  // whether every sum fits int32, before it is rounded
};

// What is added to the uint8 outputs of a layer, place by place.
struct Residual {
  AddSettings by;
  const uint8_t* other;
  bool first;  // whether the layer's own values are the left ones of the sum
};

// round((sum - count * x_zero) / count * multiplier) + zero_point, in [0, 255].
struct MeanSettings {
  int32_t x_zero;
  float multiplier;
  int32_t zero_point;
};

// round((x - x_zero) * multiplier) + zero_point, in [0, 255].
struct RescaleSettings {
  int32_t x_zero;
  float multiplier;
  int32_t zero_point;
  uint8_t table[256];  // that of every x, as `fill_table` computes it

  void fill_table();
};

struct ElementKernels {
  // a_step and b_step are 1, or 0 where one value meets the whole row; `add` may write over a row that it reads.
  void (*add)(const AddSettings& s, const uint8_t* a, int a_step, const uint8_t* b, int b_step, int64_t n, uint8_t* out);
  const BinaryKind* binary;  // operators that are functions of two bytes; the last has no line
  // out[i] = table[x[i]]; out may be x.
  void (*lookup)(const uint8_t* table, const uint8_t* x, int64_t n, uint8_t* out);
  // out[i] = s.table[x[i]], by whichever is faster: looked up or computed. Rows may be short.
  void (*rescale)(const RescaleSettings& s, const uint8_t* x, int64_t n, uint8_t* out);
  // out[i] = (a[i] - zero) * of_a + (b[i] - zero) * of_b, for resizing: between two lines of an image.
  void (*blend_rows)(const uint8_t* a, const uint8_t* b, int32_t zero, float of_a, float of_b, int64_t n, float* out);
  // Pixel o is round((x[first[o]] * of_first[o] + x[second[o]] * of_second[o]) * s.multiplier) + s.zero_point in [0, 255], of
  // pixels of `channels` values.
  void (*blend_pixels)(const float* x, const int32_t* first, const int32_t* second, const float* of_first,
                       const float* of_second, int64_t outputs, int64_t channels, const RescaleSettings& s, uint8_t* out);
  // out[i * channels + c] = rows[c * stride + i], for 2, 3 or 4 channels.
  void (*interleave)(const uint8_t* rows, int64_t stride, int64_t channels, int64_t n, uint8_t* out);
  // A line of `outputs` pixels of `channels` side by side: each is the largest of the columns [begin[o], end[o]) by `step` in
  // all `count` rows, 0 where there are none.
  void (*max_windows)(const uint8_t* const* rows, int64_t count, const int64_t* begin, const int64_t* end, int64_t step,
                      int64_t outputs, int64_t channels, uint8_t* out);
  // sums[i] += x[i].
  void (*sum_into)(const uint8_t* x, int64_t n, int32_t* sums);
  int32_t (*sum)(const uint8_t* x, int64_t n);
  // `read` values were added up, and the rest of `count` were the real zero.
  void (*mean)(const MeanSettings& s, const int32_t* sums, int32_t read, int32_t count, int64_t n, uint8_t* out);
};

const ElementKernels& element_kernels();

}  // namespace octet

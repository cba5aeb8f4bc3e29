// Static convolutions of 1 to 3 dimensions over any PackedGemm: channels last, activations uint8, sums exact int32.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/conv/conv_shape.h"
#include "core/cpu/scratch.h"
#include "core/gemm/linear.h"

namespace octet {

// The weight of a group, int8 (n, channels, rows of the kernel, width), as a PackedGemm multiplies it: (n, rows * filled row)
// with the channels last, as the gathered rows of activations have them, and zeros where the rows of the kernel are filled up.
std::vector<int8_t> kernel_rows(const int8_t* weight, int64_t n, int64_t channels, int64_t rows, int64_t width,
                                int64_t groups);

// The weight of a depthwise convolution, int8 (channels, 1, *kernel), as this CPU's kernel reads it.
class PackedDepthwise {
 public:
  PackedDepthwise(const int8_t* weight, int64_t channels, const int64_t (&kernel)[3]);
  // [tap][channel], for the plain loops.
  const int8_t* by_tap() const { return by_tap_.data(); }
  const int32_t* row_sums() const { return row_sums_.data(); }
  // For native_depthwise(); null where that has no kernel for this shape.
  const int8_t* native() const { return native_; }
  // Memory that it holds, for the report.
  int64_t bytes() const;

 private:
  std::vector<int8_t> by_tap_;
  std::vector<int32_t> row_sums_;
  Scratch<int8_t> packed_;  // aligned
  int64_t packed_bytes_ = 0;
  const int8_t* native_ = nullptr;
};

// q_x (batch, *in, channels), out (batch, *out, out_channels). `groups` holds a packed weight (out_channels / groups, k())
// per group, with zeros where the rows of the kernel are filled up; for a depthwise convolution it is empty and `depthwise` is used.
void conv_static(const ConvShape& shape, const std::vector<std::shared_ptr<const PackedGemm>>& groups,
                 const PackedDepthwise* depthwise, const uint8_t* q_x, int32_t zero_point, const int32_t* bias,
                 const StaticOutput& output);

// The weight of a 3 x 3 convolution of stride 1, int8 (outputs, channels, 1, 3, 3), for native_winograd().
class PackedWinograd {
 public:
  // Whether a layer of this shape is faster so on this CPU, with uint8 outputs.
  static bool serves(const ConvShape& shape);
  PackedWinograd(const int8_t* weight, int64_t outputs, int64_t channels);
  // Null where the weights are so large that the sums might not be exact (kernels/README.md, equation 10).
  const int8_t* data() const { return packed_.get(); }
  const int32_t* row_sums() const { return row_sums_.data(); }
  // Memory that it holds, for the report: at most what `serves` allows for a layer, and the sums.
  int64_t bytes() const;

 private:
  struct Free {
    void operator()(int8_t* memory) const;
  };
  std::unique_ptr<int8_t[], Free> packed_;
  int64_t packed_bytes_ = 0;
  std::vector<int32_t> row_sums_;
};

// conv_static of a weight that has data, to `output.quantized`.
void conv_winograd(const ConvShape& shape, const PackedWinograd& weight, const uint8_t* q_x, int32_t zero_point,
                   const int32_t* bias, const StaticOutput& output);

}  // namespace octet

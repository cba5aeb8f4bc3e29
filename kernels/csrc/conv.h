// Static convolutions of 1 to 3 dimensions over any PackedGemm: channels last, activations uint8, sums exact int32.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "drivers.h"

namespace octet {

// Depth, height, width; a convolution of fewer dimensions has the first ones 1.
struct ConvShape {
  int64_t batch, in[3], channels;
  int64_t kernel[3], out[3], out_channels;
  int64_t stride[3], padding[3], dilation[3];  // padding before; what lies outside, before or after, is the zero point
  int64_t groups;
  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  int64_t pixels() const { return batch * out[0] * out[1] * out[2]; }
  bool depthwise() const { return groups == channels && channels == out_channels && groups > 1; }
};

// q_x (batch, *in, channels), out (batch, *out, out_channels). `groups` holds a packed weight (out_channels / groups,
// taps * channels / groups) per group; for a depthwise convolution it is empty and `weight` (channels, taps) is read.
void conv_static(const ConvShape& shape, const std::vector<std::shared_ptr<const PackedGemm>>& groups,
                 const int8_t* weight, const uint8_t* q_x, int32_t zero_point, const int32_t* bias,
                 const StaticOutput& output);

}  // namespace octet

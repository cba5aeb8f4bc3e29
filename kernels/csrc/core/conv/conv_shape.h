// The shape of a convolution, checked in one place for all callers: operators, plans, and programs that use the core.
#pragma once

#include <cstdint>
#include <span>

namespace octet {

// Depth, height, width; a convolution of fewer dimensions has the first ones 1. conv_shape() makes valid ones.
struct ConvShape {
  int64_t batch, in[3], channels;
  int64_t kernel[3], out[3], out_channels;
  int64_t stride[3], padding[3], dilation[3];  // padding before; after, what `out` needs
  int64_t groups;
  // Bytes of a row of the kernel in a row of the product, and of the whole row.
  int64_t row_bytes() const;
  int64_t k() const { return kernel[0] * kernel[1] * row_bytes(); }
  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  int64_t pixels() const { return batch * out[0] * out[1] * out[2]; }
  // Whether a plane of outputs is of one plane of the input alone, none of padding, and the next is `stride` planes on.
  bool in_planes() const { return kernel[0] == 1 && padding[0] == 0 && (out[0] - 1) * stride[0] < in[0]; }
  bool depthwise() const { return groups == channels && channels == out_channels && groups > 1; }
};

// Settings of a convolution: one value per spatial dimension.
struct ConvSettings {
  std::span<const int64_t> stride, padding, dilation;
  int64_t groups;
  // Padding of the input besides `padding`, per dimension of the input, or nothing.
  std::span<const int64_t> before = {}, after = {};
};

// Of an input (batch, channels, *spatial) and a weight (out_channels, channels / groups, *kernel) with 1 to 3 spatial dimensions.
// Raises std::invalid_argument where they do not go together.
ConvShape conv_shape(std::span<const int64_t> input, std::span<const int64_t> weight, const ConvSettings& settings);

// Of a kernel `width` columns wide over `channels` of one group. Without groups the columns lie side by side in the image,
// and kernels that take them from there (Pieces) want whole steps.
inline int64_t packed_kernel_row(int64_t width, int64_t channels, int64_t groups) {
  const int64_t bytes = width * channels;
  return groups == 1 ? (bytes + 3) / 4 * 4 : bytes;
}

inline int64_t ConvShape::row_bytes() const { return packed_kernel_row(kernel[2], channels / groups, groups); }

}  // namespace octet

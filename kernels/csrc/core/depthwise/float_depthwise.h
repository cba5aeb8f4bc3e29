// Depthwise convolutions of float32 images as they lie, (batch, channels, height, width): what calibration runs of a float model.
#pragma once

#include <cstdint>

namespace octet {

// One of the two dimensions of an image.
struct FloatDepthwiseSide {
  int64_t size, kernel, stride, padding, dilation;

  int64_t reach() const { return (kernel - 1) * dilation; }  // of a kernel beyond its first tap
  int64_t out() const { return (size + 2 * padding - reach() - 1) / stride + 1; }
};

// out (planes, outputs of height, outputs of width) of x (planes, height, width), where plane p has the kernel and the bias of
// channel p % channels; `bias` may be null. A sum begins with the bias and takes the taps row by row, each product fused with the
// sum where the CPU can: the order of oneDNN's kernels.
void float_depthwise(const FloatDepthwiseSide& height, const FloatDepthwiseSide& width, int64_t planes, int64_t channels,
                     const float* x, const float* weight, const float* bias, float* out);

}  // namespace octet

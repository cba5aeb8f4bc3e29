// The operator of float depthwise convolutions.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "core/depthwise/float_depthwise.h"
#include "torch/operands.h"

namespace octet {
namespace {

using at::Tensor;

// Far above any network's; what is padded and dealt out is then no larger than the image and some millions.
constexpr int64_t kMostReach = 1024;

FloatDepthwiseSide side(const char* name, int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  TORCH_CHECK_VALUE(kernel > 0 && stride > 0 && dilation > 0 && padding >= 0 && kernel <= kMostReach && dilation <= kMostReach &&
                        stride <= kMostReach && padding <= kMostReach && kernel * dilation <= kMostReach,
                    "depthwise_f32: ", name, " has kernel ", kernel, ", stride ", stride, ", padding ", padding, ", dilation ",
                    dilation, ", expected positive ones, padding not negative, all and kernel * dilation at most ", kMostReach);
  const FloatDepthwiseSide made{size, kernel, stride, padding, dilation};
  TORCH_CHECK_VALUE(size > 0 && made.reach() < size + 2 * padding, "depthwise_f32: ", name, " is ", size, " with padding ", padding,
                    ", less than the kernel's ", made.reach() + 1);
  return made;
}

Tensor depthwise_f32_op(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                        at::IntArrayRef padding, at::IntArrayRef dilation) {
  const bool has_bias = bias && bias->defined();
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && (!has_bias || bias->scalar_type() == at::kFloat),
                   "depthwise_f32: x is ", x.scalar_type(), " and weight ", weight.scalar_type(), ", expected Float, and bias too");
  TORCH_CHECK_VALUE(x.dim() == 4, "depthwise_f32: x has shape ", x.sizes(), ", expected (batch, channels, height, width)");
  const int64_t channels = x.size(1);
  TORCH_CHECK_VALUE(weight.dim() == 4 && weight.size(0) == channels && weight.size(1) == 1, "depthwise_f32: weight has shape ",
                    weight.sizes(), ", expected (", channels, ", 1, height, width)");
  TORCH_CHECK_VALUE(!has_bias || (bias->dim() == 1 && bias->size(0) == channels), "depthwise_f32: bias has shape ", bias->sizes(),
                    ", expected (", channels, ")");
  TORCH_CHECK_VALUE(stride.size() == 2 && padding.size() == 2 && dilation.size() == 2,
                    "depthwise_f32: stride, padding and dilation have ", stride.size(), ", ", padding.size(), " and ",
                    dilation.size(), " numbers, expected 2 each");
  const FloatDepthwiseSide height = side("height", x.size(2), weight.size(2), stride[0], padding[0], dilation[0]);
  const FloatDepthwiseSide width = side("width", x.size(3), weight.size(3), stride[1], padding[1], dilation[1]);
  Tensor out = at::empty({x.size(0), channels, height.out(), width.out()}, x.options());
  if (out.numel() == 0) return out;
  const Tensor values = x.contiguous(), taps = weight.contiguous(), first = has_bias ? bias->contiguous() : Tensor();
  float_depthwise(height, width, x.size(0) * channels, channels, values.const_data_ptr<float>(), taps.const_data_ptr<float>(),
                  has_bias ? first.const_data_ptr<float>() : nullptr, out.mutable_data_ptr<float>());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) { m.impl("depthwise_f32", &Defined<&depthwise_f32_op>::call); }

}  // namespace octet

// The operators of training: fake quantisation, and the mask of its gradient.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "core/rows/fake_quantize.h"

namespace octet {
namespace {

using at::Tensor;

void check_float(const Tensor& tensor, const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, name, " is ", tensor.scalar_type(), ", expected Float");
}

Tensor dense(const Tensor& tensor) { return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous(); }

std::tuple<Tensor, Tensor> fake_quantize_op(const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                                            std::optional<int64_t> axis, int64_t quant_min, int64_t quant_max,
                                            double low, double high, bool with_mask) {
  check_float(x, "x");
  check_float(scale, "scale");
  TORCH_CHECK_TYPE(zero_point.scalar_type() == at::kInt, "zero_point is ", zero_point.scalar_type(), ", expected Int");
  int64_t channels = 1, inner = x.numel();
  Tensor input;
  if (axis) {
    TORCH_CHECK_VALUE(*axis >= -x.dim() && *axis < x.dim(), "axis ", *axis, " does not exist in shape ", x.sizes());
    input = x.contiguous();
    const int64_t place = *axis < 0 ? *axis + x.dim() : *axis;
    channels = x.size(place);
    inner = 1;
    for (int64_t d = place + 1; d < x.dim(); ++d) inner *= x.size(d);
  } else {
    input = dense(x);
  }
  TORCH_CHECK_VALUE(scale.numel() == channels && zero_point.numel() == channels, "scale has ", scale.numel(),
                    " values and zero_point ", zero_point.numel(), ", expected ", channels);
  const Tensor scales = scale.contiguous(), points = zero_point.contiguous();
  Tensor out = at::empty_like(input);
  Tensor mask = with_mask ? at::empty_like(input, input.options().dtype(at::kBool))
                          : at::empty({0}, input.options().dtype(at::kBool));
  if (input.numel() == 0) return {out, mask};
  fake_quantize({scales.const_data_ptr<float>(), points.const_data_ptr<int32_t>(), channels, inner, quant_min, quant_max, low,
                 high},
                input.const_data_ptr<float>(), input.numel(), out.mutable_data_ptr<float>(),
                with_mask ? mask.mutable_data_ptr<bool>() : nullptr);
  return {out, mask};
}

Tensor masked_gradient_op(const Tensor& grad, const Tensor& mask) {
  check_float(grad, "grad");
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool, "mask is ", mask.scalar_type(), ", expected Bool");
  TORCH_CHECK_VALUE(grad.sizes() == mask.sizes(), "grad has shape ", grad.sizes(), " and mask ", mask.sizes());
  const Tensor inside = dense(mask);
  Tensor out = at::empty_like(inside, inside.options().dtype(at::kFloat));
  // A gradient need not lie as the values do: that of a sum is one number, expanded.
  const Tensor given = grad.strides() == inside.strides() ? grad : at::empty_like(out).copy_(grad);
  masked_gradient(given.const_data_ptr<float>(), inside.const_data_ptr<bool>(), out.numel(), out.mutable_data_ptr<float>());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("fake_quantize", &fake_quantize_op);
  m.impl("masked_gradient", &masked_gradient_op);
}

}  // namespace octet

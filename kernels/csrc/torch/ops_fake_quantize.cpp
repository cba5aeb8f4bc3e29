// The operators of training: fake quantisation, the mask of its gradient, and what a step computes its ranges of.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "core/rows/batch_statistics.h"
#include "core/rows/wrapping.h"
#include "core/rows/fake_quantize.h"
#include "core/rows/moving_range.h"
#include "core/rows/rounded_weight.h"
#include "torch/operands.h"

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
  check_limits(quant_min, quant_max);
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

void check_scalar(const Tensor& state, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(state.scalar_type() == dtype, name, " is ", state.scalar_type(), ", expected ", dtype);
  TORCH_CHECK_VALUE(state.numel() == 1, name, " has shape ", state.sizes(), ", expected one value");
}

void follow_range_op(const Tensor& x, double momentum, double low, double high, int64_t quant_min, int64_t quant_max,
                     std::optional<int64_t> middle, Tensor& average_low, Tensor& average_high, Tensor& batches,
                     Tensor& nan_count, Tensor& inf_count, Tensor& scale, Tensor& zero_point) {
  check_limits(quant_min, quant_max);
  TORCH_CHECK_VALUE(!middle || (quant_min < *middle && *middle < quant_max), "middle is ", *middle, ", expected a number between ",
                    quant_min, " and ", quant_max);
  check_float(x, "x");
  check_scalar(average_low, "average_low", at::kFloat);
  check_scalar(average_high, "average_high", at::kFloat);
  check_scalar(batches, "batches", at::kLong);
  check_scalar(nan_count, "nan_count", at::kLong);
  check_scalar(inf_count, "inf_count", at::kLong);
  check_scalar(scale, "scale", at::kFloat);
  check_scalar(zero_point, "zero_point", at::kInt);
  const Tensor input = dense(x);
  const MovingRange range{momentum,
                          static_cast<float>(low),
                          static_cast<float>(high),
                          quant_min,
                          quant_max,
                          middle,
                          average_low.mutable_data_ptr<float>(),
                          average_high.mutable_data_ptr<float>(),
                          batches.mutable_data_ptr<int64_t>()};
  const NonFinite left_out = follow(input.const_data_ptr<float>(), input.numel(), range);
  add_to(*nan_count.mutable_data_ptr<int64_t>(), left_out.nan);
  add_to(*inf_count.mutable_data_ptr<int64_t>(), left_out.inf);
  choose_scale(range, scale.mutable_data_ptr<float>(), zero_point.mutable_data_ptr<int32_t>());
}

std::tuple<Tensor, Tensor> round_weight_op(const Tensor& weight, const std::optional<Tensor>& gain,
                                           const std::optional<Tensor>& bias, const std::optional<Tensor>& input_scale,
                                           double largest_bias, int64_t quant_max) {
  check_float(weight, "weight");
  TORCH_CHECK_VALUE(quant_max > 0 && quant_max < 1 << 24 && (quant_max & (quant_max + 1)) == 0, "quant_max is ", quant_max,
                    ", expected 2**bits - 1 of 1 to 24 bits");
  TORCH_CHECK_VALUE(weight.dim() > 0, "weight has no dimension, expected its output channels first");
  TORCH_CHECK_VALUE(bias.has_value() == input_scale.has_value(), "bias and input_scale come together");
  const int64_t rows = weight.size(0);
  const Tensor values = weight.contiguous();
  const auto by_row = [&](const std::optional<Tensor>& one, const char* name) {
    if (!one) return Tensor();
    check_float(*one, name);
    TORCH_CHECK_VALUE(one->numel() == rows, name, " has ", one->numel(), " values, expected ", rows);
    return one->contiguous();
  };
  const Tensor gains = by_row(gain, "gain"), biases = by_row(bias, "bias");
  if (input_scale) check_scalar(*input_scale, "input_scale", at::kFloat);
  Tensor out = at::empty_like(values), scale = at::empty({rows}, values.options());
  round_weight({values.const_data_ptr<float>(), rows, rows ? values.numel() / rows : 0, gain ? gains.const_data_ptr<float>() : nullptr,
                bias ? biases.const_data_ptr<float>() : nullptr, input_scale ? *input_scale->const_data_ptr<float>() : 1.0f,
                static_cast<float>(largest_bias), quant_max},
               out.mutable_data_ptr<float>(), scale.mutable_data_ptr<float>());
  return {out, scale};
}

std::tuple<Tensor, Tensor> batch_statistics_op(const Tensor& x) {
  check_float(x, "x");
  TORCH_CHECK_VALUE(x.dim() > 1 && x.numel() > 0, "x has shape ", x.sizes(), ", expected (batch, channels, ...), not empty");
  const Tensor input = x.contiguous();
  const int64_t batch = x.size(0), channels = x.size(1);
  Tensor mean = at::empty({channels}, input.options()), variance = at::empty({channels}, input.options());
  batch_statistics(input.const_data_ptr<float>(), batch, channels, input.numel() / (batch * channels),
                   mean.mutable_data_ptr<float>(), variance.mutable_data_ptr<float>());
  return {mean, variance};
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("fake_quantize", &Defined<&fake_quantize_op>::call);
  m.impl("masked_gradient", &Defined<&masked_gradient_op>::call);
  m.impl("follow_range", &Defined<&follow_range_op>::call);
  m.impl("round_weight", &Defined<&round_weight_op>::call);
  m.impl("batch_statistics", &Defined<&batch_statistics_op>::call);
}

}  // namespace octet

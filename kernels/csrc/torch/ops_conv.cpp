// The static convolution operators: check the tensors, find the packed weights, call the core.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "core/conv/conv.h"
#include "core/cpu/transpose.h"
#include "torch/packed.h"

namespace octet {
namespace {

using at::Tensor;

struct ConvCall {
  ConvShape shape{};
  Tensor input, bias;
  std::vector<std::shared_ptr<const PackedGemm>> groups;
  std::shared_ptr<const PackedDepthwise> depthwise;
  std::vector<int64_t> out_sizes;
};

// One of stride, padding, ... as three numbers, the missing first ones being `fill`.
void spread(at::IntArrayRef values, int64_t dims, int64_t fill, const char* name, int64_t (&out)[3]) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(values.size()) == dims, name, " has ", values.size(), " values, expected ", dims);
  std::fill(out, out + 3, fill);
  std::copy(values.begin(), values.end(), out + 3 - dims);
}

// Contiguous, with the channels innermost; no copy where they are.
Tensor channels_last(const Tensor& q_x) {
  Tensor moved = q_x.movedim(1, -1);
  if (moved.is_contiguous() || !q_x.is_contiguous() || q_x.numel() == 0) return moved.contiguous();
  Tensor out = at::empty(moved.sizes(), q_x.options());
  const int64_t channels = q_x.size(1), sample = q_x.numel() / q_x.size(0), pixels = sample / channels;
  for (int64_t n = 0; n < q_x.size(0); ++n) {
    const uint8_t* from = q_x.const_data_ptr<uint8_t>() + n * sample;
    uint8_t* to = out.mutable_data_ptr<uint8_t>() + n * sample;
    each_tile(pixels, channels, [&](int64_t begin, int64_t count, int64_t first, int64_t rows) {
      transpose(from + first * pixels + begin, pixels, rows, count, to + begin * channels + first, channels);
    });
  }
  return out;
}

ConvCall conv_call(const Tensor& q_x, const Tensor& q_weight, const std::optional<Tensor>& q_bias,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                   c10::string_view backend) {
  const int64_t dims = q_x.dim() - 2;
  TORCH_CHECK_VALUE(dims >= 1 && dims <= 3 && q_weight.dim() == q_x.dim(), "q_x has shape ", q_x.sizes(),
                    " and q_weight ", q_weight.sizes(), ", expected (batch, channels, *spatial) and (out_channels, channels "
                    "/ groups, *kernel) of 1 to 3 spatial dimensions");
  TORCH_CHECK_TYPE(q_x.scalar_type() == at::kByte && q_weight.scalar_type() == at::kChar, "q_x is ", q_x.scalar_type(),
                   " and q_weight ", q_weight.scalar_type(), ", expected Byte and Char");
  const int64_t channels = q_x.size(1), outputs = q_weight.size(0);
  TORCH_CHECK_VALUE(groups >= 1 && channels == q_weight.size(1) * groups && outputs % groups == 0, "q_x has ", channels,
                    " channels, q_weight ", q_weight.sizes(), " expects ", q_weight.size(1) * groups, " in ", groups,
                    " groups");
  ConvCall call;
  ConvShape& shape = call.shape;
  spread(q_x.sizes().slice(2, dims), dims, 1, "q_x", shape.in);
  spread(q_weight.sizes().slice(2, dims), dims, 1, "q_weight", shape.kernel);
  spread(stride, dims, 1, "stride", shape.stride);
  spread(padding, dims, 0, "padding", shape.padding);
  spread(dilation, dims, 1, "dilation", shape.dilation);
  shape.batch = q_x.size(0), shape.channels = channels, shape.out_channels = outputs, shape.groups = groups;
  call.out_sizes = {shape.batch};
  for (int axis = 0; axis < 3; ++axis) {
    TORCH_CHECK_VALUE(shape.stride[axis] > 0 && shape.dilation[axis] > 0 && shape.padding[axis] >= 0,
                      "stride and dilation must be positive and padding not negative");
    const int64_t room = shape.in[axis] + 2 * shape.padding[axis] - shape.dilation[axis] * (shape.kernel[axis] - 1);
    TORCH_CHECK_VALUE(room >= 1, "the kernel ", q_weight.sizes(), " does not fit the padded input ", q_x.sizes());
    shape.out[axis] = (room - 1) / shape.stride[axis] + 1;
    if (axis >= 3 - dims) call.out_sizes.push_back(shape.out[axis]);
  }
  call.out_sizes.push_back(outputs);
  call.input = channels_last(q_x);
  if (q_bias && q_bias->defined()) {
    TORCH_CHECK_VALUE(q_bias->dim() == 1 && q_bias->size(0) == outputs && q_bias->scalar_type() == at::kInt,
                      "q_bias must be Int of shape (", outputs, ",), got ", q_bias->scalar_type(), " ", q_bias->sizes());
    call.bias = q_bias->contiguous();
  }
  if (shape.depthwise())
    call.depthwise = packed_depthwise(q_weight);
  else
    for (int64_t g = 0; g < groups; ++g) call.groups.push_back(packed_conv(q_weight, g, groups, backend));
  return call;
}

Tensor run(const ConvCall& call, int64_t zero_point, at::ScalarType dtype, StaticOutput output,
           const std::optional<Tensor>& multiplier) {
  TORCH_CHECK_VALUE(zero_point >= 0 && zero_point <= 255, "zero_point is ", zero_point, ", expected 0 to 255");
  Tensor factors;
  if (multiplier) {
    TORCH_CHECK_VALUE(multiplier->dim() == 1 && multiplier->size(0) == call.shape.out_channels &&
                          multiplier->scalar_type() == at::kFloat,
                      "multiplier must be Float of shape (", call.shape.out_channels, ",), got ",
                      multiplier->scalar_type(), " ", multiplier->sizes());
    factors = multiplier->contiguous();
    output.multiplier = factors.const_data_ptr<float>();
  }
  Tensor y = at::empty(call.out_sizes, call.input.options().dtype(dtype));
  if (dtype == at::kInt) output.sums = y.mutable_data_ptr<int32_t>();
  if (dtype == at::kFloat) output.reals = y.mutable_data_ptr<float>();
  if (dtype == at::kByte) output.quantized = y.mutable_data_ptr<uint8_t>();
  conv_static(call.shape, call.groups, call.depthwise.get(), call.input.const_data_ptr<uint8_t>(),
              static_cast<int32_t>(zero_point), call.bias.defined() ? call.bias.const_data_ptr<int32_t>() : nullptr,
              output);
  return y.movedim(-1, 1);
}

Tensor conv_u8s8_s32_op(const Tensor& q_x, int64_t zero_point, const Tensor& q_weight,
                        const std::optional<Tensor>& q_bias, at::IntArrayRef stride, at::IntArrayRef padding,
                        at::IntArrayRef dilation, int64_t groups,
                        c10::string_view backend) {
  return run(conv_call(q_x, q_weight, q_bias, stride, padding, dilation, groups, backend), zero_point,
             at::kInt, {}, std::nullopt);
}

Tensor conv_u8s8_f32_op(const Tensor& q_x, int64_t zero_point, const Tensor& q_weight,
                        const std::optional<Tensor>& q_bias, at::IntArrayRef stride, at::IntArrayRef padding,
                        at::IntArrayRef dilation, int64_t groups,
                        const Tensor& multiplier, c10::string_view backend) {
  return run(conv_call(q_x, q_weight, q_bias, stride, padding, dilation, groups, backend), zero_point,
             at::kFloat, {}, multiplier);
}

Tensor conv_u8s8_u8_op(const Tensor& q_x, int64_t zero_point, const Tensor& q_weight,
                       const std::optional<Tensor>& q_bias, at::IntArrayRef stride, at::IntArrayRef padding,
                       at::IntArrayRef dilation, int64_t groups, const Tensor& multiplier,
                       int64_t output_zero_point, int64_t quant_min, int64_t quant_max, c10::string_view backend) {
  StaticOutput output;
  output.zero_point = static_cast<int32_t>(output_zero_point);
  output.bottom = static_cast<int32_t>(quant_min);
  output.top = static_cast<int32_t>(quant_max);
  return run(conv_call(q_x, q_weight, q_bias, stride, padding, dilation, groups, backend), zero_point,
             at::kByte, output, multiplier);
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("conv_u8s8_s32", &conv_u8s8_s32_op);
  m.impl("conv_u8s8_f32", &conv_u8s8_f32_op);
  m.impl("conv_u8s8_u8", &conv_u8s8_u8_op);
}

}  // namespace octet

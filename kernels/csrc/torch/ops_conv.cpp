// The static convolution operators: check the tensors, find the packed weights, call the core.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <span>

#include "core/conv/conv.h"
#include "core/cpu/transpose.h"
#include "torch/errors.h"
#include "torch/operands.h"
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

std::span<const int64_t> span(at::IntArrayRef values) { return {values.data(), values.size()}; }

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
  TORCH_CHECK_TYPE(q_x.scalar_type() == at::kByte && q_weight.scalar_type() == at::kChar, "q_x is ", q_x.scalar_type(),
                   " and q_weight ", q_weight.scalar_type(), ", expected Byte and Char");
  ConvCall call;
  call.shape = translated("", [&] {
    return conv_shape(span(q_x.sizes()), span(q_weight.sizes()), {span(stride), span(padding), span(dilation), groups});
  });
  const ConvShape& shape = call.shape;
  const int64_t outputs = shape.out_channels;
  call.out_sizes = {shape.batch};
  call.out_sizes.insert(call.out_sizes.end(), shape.out + 5 - q_x.dim(), shape.out + 3);
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
  const int32_t input_zero = checked_byte(zero_point, "zero_point");
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
              input_zero, call.bias.defined() ? call.bias.const_data_ptr<int32_t>() : nullptr, output);
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
  const StaticOutput output = translated("", [&] { return requantized_output(output_zero_point, quant_min, quant_max); });
  return run(conv_call(q_x, q_weight, q_bias, stride, padding, dilation, groups, backend), zero_point,
             at::kByte, output, multiplier);
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("conv_u8s8_s32", &Defined<&conv_u8s8_s32_op>::call);
  m.impl("conv_u8s8_f32", &Defined<&conv_u8s8_f32_op>::call);
  m.impl("conv_u8s8_u8", &Defined<&conv_u8s8_u8_op>::call);
}

}  // namespace octet

// The operators of linear layers: check the tensors, find the packed weight, call the core. The schemas and shape functions of
// all operators are in kernels/ops.py.
#include <ATen/ATen.h>
#include <c10/util/DimVector.h>
#include <torch/library.h>

#include <vector>

#include "core/gemm/linear.h"
#include "torch/errors.h"
#include "torch/operands.h"
#include "torch/packed.h"

namespace octet {
namespace {

Tensor linear_dynamic_op(const Tensor& x, const Tensor& q_weight, const Tensor& scale, const OptionalTensor& bias,
                         const OptionalTensor& columns, int64_t activation_bits, bool per_row, bool relu,
                         c10::string_view backend) {
  const auto [gemm, weight_scale] = packed_weight(q_weight, scale, "scale", backend);
  check_features(x, *gemm);
  check_bits(activation_bits);
  const Tensor input = checked(x, at::kFloat, "input");
  const Tensor real_bias = vector(bias, gemm->n(), "bias"), factors = vector(columns, gemm->k(), "columns");
  const Linear layer{gemm.get(),          data<float>(weight_scale), data<float>(real_bias), data<float>(factors),
                     static_cast<int>(activation_bits), per_row,    relu};
  c10::DimVector shape(x.sizes());
  shape.back() = gemm->n();
  Tensor y = empty_reals(shape);
  linear_dynamic(layer, input.const_data_ptr<float>(), gemm->k(), rows_of(input), y.mutable_data_ptr<float>());
  return y;
}

Tensor linear_dynamic_plain_op(const Tensor& x, const Tensor& q_weight, const Tensor& scale,
                               const OptionalTensor& bias) {
  return linear_dynamic_op(x, q_weight, scale, bias, {}, 8, true, false, "");
}

struct StaticCall {
  std::shared_ptr<const PackedGemm> gemm;
  Tensor input, bias, factors;
};

StaticCall static_call(const Tensor& q_x, const Tensor& q_weight, const OptionalTensor& q_bias,
                       const OptionalTensor& multiplier, c10::string_view backend) {
  // Before anything is packed: a weight without columns may say that it has any number of rows.
  const bool has_rows = q_weight.dim() > 1;
  const Tensor input = checked(q_x, at::kByte, "q_x");
  const Tensor bias = has_rows ? vector(q_bias, q_weight.size(0), "q_bias", at::kInt) : Tensor();
  const Tensor factors = has_rows ? vector(multiplier, q_weight.size(0), "multiplier") : Tensor();
  const auto gemm = packed(q_weight, backend);
  check_features(q_x, *gemm);
  return {gemm, input, bias, factors};
}

Tensor run_static(const StaticCall& call, int64_t zero_point, at::ScalarType dtype, StaticOutput output,
                  void (*aim)(StaticOutput&, const Tensor&)) {
  Tensor y = at::empty(with_last(call.input.sizes(), call.gemm->n()), call.input.options().dtype(dtype));
  aim(output, y);
  linear_static(*call.gemm, call.input.const_data_ptr<uint8_t>(), checked_byte(zero_point, "zero_point"),
                rows_of(call.input), data<int32_t>(call.bias), output);
  return y;
}

Tensor linear_u8s8_s32_op(const Tensor& q_x, int64_t zero_point, const Tensor& q_weight, const OptionalTensor& q_bias,
                          c10::string_view backend) {
  return run_static(static_call(q_x, q_weight, q_bias, {}, backend), zero_point, at::kInt, {},
                    [](StaticOutput& output, const Tensor& y) { output.sums = y.mutable_data_ptr<int32_t>(); });
}

Tensor linear_u8s8_f32_op(const Tensor& q_x, int64_t zero_point, const Tensor& q_weight, const OptionalTensor& q_bias,
                          const Tensor& multiplier, c10::string_view backend) {
  const StaticCall call = static_call(q_x, q_weight, q_bias, multiplier, backend);
  StaticOutput output;
  output.multiplier = data<float>(call.factors);
  return run_static(call, zero_point, at::kFloat, output,
                    [](StaticOutput& out, const Tensor& y) { out.reals = y.mutable_data_ptr<float>(); });
}

Tensor linear_u8s8_u8_op(const Tensor& q_x, int64_t zero_point, const Tensor& q_weight, const OptionalTensor& q_bias,
                         const Tensor& multiplier, int64_t output_zero_point, int64_t quant_min, int64_t quant_max,
                         c10::string_view backend) {
  const StaticCall call = static_call(q_x, q_weight, q_bias, multiplier, backend);
  StaticOutput output = translated("", [&] { return requantized_output(output_zero_point, quant_min, quant_max); });
  output.multiplier = data<float>(call.factors);
  return run_static(call, zero_point, at::kByte, output,
                    [](StaticOutput& out, const Tensor& y) { out.quantized = y.mutable_data_ptr<uint8_t>(); });
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("linear_u8s8_s32", &Defined<&linear_u8s8_s32_op>::call);
  m.impl("linear_u8s8_f32", &Defined<&linear_u8s8_f32_op>::call);
  m.impl("linear_u8s8_u8", &Defined<&linear_u8s8_u8_op>::call);
  m.impl("linear_dynamic", &Defined<&linear_dynamic_op>::call);
  m.impl("linear_dynamic_plain", &Defined<&linear_dynamic_plain_op>::call);
}

}  // namespace octet

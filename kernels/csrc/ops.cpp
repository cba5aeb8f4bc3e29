// The torch operators: check the tensors, find the packed weight, call the driver. Their schemas and shape functions are
// in kernels/ops.py.
#include <ATen/ATen.h>
#include <c10/util/DimVector.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "cpu.h"
#include "libraries.h"
#include "linear.h"
#include "operands.h"
#include "packed.h"
#include "transpose.h"

namespace octet {
namespace {

Tensor linear_dynamic_op(const Tensor& x, const Tensor& q_weight, const Tensor& scale, const OptionalTensor& bias,
                         const OptionalTensor& columns, int64_t activation_bits, bool per_row, bool relu,
                         c10::string_view backend) {
  const auto gemm = packed(q_weight, backend);
  check_features(x, *gemm);
  check_bits(activation_bits);
  const Tensor input = checked(x, at::kFloat, "input");
  const Tensor weight_scale = vector(scale, gemm->n(), "scale");
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
  Tensor input, bias;
};

StaticCall static_call(const Tensor& q_x, const Tensor& q_weight, const OptionalTensor& q_bias,
                       c10::string_view backend) {
  const auto gemm = packed(q_weight, backend);
  check_features(q_x, *gemm);
  return {gemm, checked(q_x, at::kByte, "q_x"), vector(q_bias, gemm->n(), "q_bias", at::kInt)};
}

Tensor run_static(const StaticCall& call, int64_t zero_point, at::ScalarType dtype, StaticOutput output,
                  void (*aim)(StaticOutput&, const Tensor&)) {
  Tensor y = at::empty(with_last(call.input.sizes(), call.gemm->n()), call.input.options().dtype(dtype));
  aim(output, y);
  linear_static(*call.gemm, call.input.const_data_ptr<uint8_t>(), static_cast<int32_t>(zero_point),
                rows_of(call.input), data<int32_t>(call.bias), output);
  return y;
}

Tensor linear_u8s8_s32_op(const Tensor& q_x, int64_t zero_point, const Tensor& q_weight, const OptionalTensor& q_bias,
                          c10::string_view backend) {
  return run_static(static_call(q_x, q_weight, q_bias, backend), zero_point, at::kInt, {},
                    [](StaticOutput& output, const Tensor& y) { output.sums = y.mutable_data_ptr<int32_t>(); });
}

Tensor linear_u8s8_f32_op(const Tensor& q_x, int64_t zero_point, const Tensor& q_weight, const OptionalTensor& q_bias,
                          const Tensor& multiplier, c10::string_view backend) {
  const StaticCall call = static_call(q_x, q_weight, q_bias, backend);
  const Tensor factors = vector(multiplier, call.gemm->n(), "multiplier");
  StaticOutput output;
  output.multiplier = data<float>(factors);
  return run_static(call, zero_point, at::kFloat, output,
                    [](StaticOutput& out, const Tensor& y) { out.reals = y.mutable_data_ptr<float>(); });
}

Tensor linear_u8s8_u8_op(const Tensor& q_x, int64_t zero_point, const Tensor& q_weight, const OptionalTensor& q_bias,
                         const Tensor& multiplier, int64_t output_zero_point, int64_t quant_min, int64_t quant_max,
                         c10::string_view backend) {
  const StaticCall call = static_call(q_x, q_weight, q_bias, backend);
  const Tensor factors = vector(multiplier, call.gemm->n(), "multiplier");
  StaticOutput output;
  output.multiplier = data<float>(factors);
  output.zero_point = static_cast<int32_t>(output_zero_point);
  output.bottom = static_cast<int32_t>(quant_min);
  output.top = static_cast<int32_t>(quant_max);
  return run_static(call, zero_point, at::kByte, output,
                    [](StaticOutput& out, const Tensor& y) { out.quantized = y.mutable_data_ptr<uint8_t>(); });
}

// Element by element, so the memory format stays: `tensor` as it lies where it lies without gaps, else a plain copy.
Tensor dense(const Tensor& tensor, at::ScalarType dtype, const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " is ", tensor.scalar_type(), ", expected ", dtype);
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}

Tensor quantize_op(const Tensor& x, double scale, int64_t zero_point) {
  const Tensor input = dense(x, at::kFloat, "input");
  Tensor q = at::empty_like(input, input.options().dtype(at::kByte));
  row_kernels().quantize(input.const_data_ptr<float>(), nullptr, input.numel(),
                         {static_cast<float>(scale), static_cast<int32_t>(zero_point)}, 255,
                         q.mutable_data_ptr<uint8_t>(), nullptr);
  return q;
}

bool all_finite_op(const Tensor& x) {
  const Tensor input = dense(x, at::kFloat, "input");
  return row_kernels().all_finite(input.const_data_ptr<float>(), input.numel());
}

// One sample's channels, side by side, put apart and made real.
void dequantize_planes(const uint8_t* q, int64_t channels, int64_t pixels, float scale, int32_t zero_point, float* out) {
  uint8_t rows[kTileChannels * kTilePixels];
  each_tile(pixels, channels, [&](int64_t begin, int64_t n, int64_t first, int64_t count) {
    transpose(q + begin * channels + first, channels, n, count, rows, kTilePixels);
    for (int64_t c = 0; c < count; ++c)
      row_kernels().dequantize(rows + c * kTilePixels, n, scale, zero_point, out + (first + c) * pixels + begin);
  });
}

Tensor dequantize_op(const Tensor& q, double scale, int64_t zero_point) {
  TORCH_CHECK_TYPE(q.scalar_type() == at::kByte, "q is ", q.scalar_type(), ", expected Byte");
  const Tensor input = q.dim() >= 4 && q.movedim(1, -1).is_contiguous() ? q : q.contiguous();
  Tensor x = at::empty(q.sizes(), q.options().dtype(at::kFloat));
  if (!input.is_contiguous()) {
    const int64_t sample = q.numel() / q.size(0), pixels = sample / q.size(1);
    for (int64_t n = 0; n < q.size(0); ++n)
      dequantize_planes(input.const_data_ptr<uint8_t>() + n * sample, q.size(1), pixels, static_cast<float>(scale),
                        static_cast<int32_t>(zero_point), x.mutable_data_ptr<float>() + n * sample);
    return x;
  }
  row_kernels().dequantize(input.const_data_ptr<uint8_t>(), input.numel(), static_cast<float>(scale),
                           static_cast<int32_t>(zero_point), x.mutable_data_ptr<float>());
  return x;
}

Tensor requantize_op(const Tensor& sums, const Tensor& multiplier, int64_t zero_point, int64_t quant_min,
                     int64_t quant_max) {
  const Tensor input = checked(sums, at::kInt, "sums");
  const Tensor factors = checked(multiplier, at::kFloat, "multiplier").reshape({-1});
  const int64_t n = factors.numel() == 1 ? input.numel() : factors.numel();
  TORCH_CHECK_VALUE(multiplier.dim() <= 1 && (factors.numel() == 1 || (input.dim() >= 1 && input.size(-1) == n)),
                    "multiplier has shape ", multiplier.sizes(), ", expected () or the last dimension of sums ",
                    sums.sizes());
  Tensor q = at::empty(sums.sizes(), sums.options().dtype(at::kByte));
  for (int64_t first = 0; first < input.numel(); first += n)
    row_kernels().requantize(input.const_data_ptr<int32_t>() + first, factors.const_data_ptr<float>(),
                             factors.numel() == 1 ? 0 : 1, n, static_cast<int32_t>(zero_point),
                             static_cast<int32_t>(quant_min), static_cast<int32_t>(quant_max),
                             q.mutable_data_ptr<uint8_t>() + first);
  return q;
}

std::string isa_op() { return isa_name(isa()); }
std::string why_not_op(c10::string_view backend) { return library(backend).why_not(); }
std::string default_backend_op() { return library("").name; }
std::string route_op(const Tensor& q_weight, c10::string_view backend) { return packed(q_weight, backend)->route(); }

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("quantize", &quantize_op);
  m.impl("dequantize", &dequantize_op);
  m.impl("requantize", &requantize_op);
  m.impl("linear_u8s8_s32", &linear_u8s8_s32_op);
  m.impl("linear_u8s8_f32", &linear_u8s8_f32_op);
  m.impl("linear_u8s8_u8", &linear_u8s8_u8_op);
  m.impl("linear_dynamic", &linear_dynamic_op);
  m.impl("linear_dynamic_plain", &linear_dynamic_plain_op);
}

// What the extension knows of itself; no tensor decides these, so they belong to no device.
TORCH_LIBRARY(octet_native, m) {
  m.def("isa() -> str", &isa_op);
  m.def("bad_isa_request() -> str", &bad_isa_request);
  m.def("why_not(str backend) -> str", &why_not_op);
  m.def("default_backend() -> str", &default_backend_op);
  m.def("all_finite(Tensor x) -> bool", &all_finite_op);
  m.def("route(Tensor q_weight, str backend) -> str", &route_op);
  m.def("packed_count() -> int", &packed_count);
}

}  // namespace octet

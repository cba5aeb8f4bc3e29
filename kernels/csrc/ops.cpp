// The torch operators: check the tensors, find the packed weight, call the driver. Their schemas and shape functions are
// in kernels/ops.py.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "cpu.h"
#include "drivers.h"
#include "packed.h"

namespace octet {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor checked(const Tensor& tensor, at::ScalarType dtype, const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " is ", tensor.scalar_type(), ", expected ", dtype);
  return tensor.contiguous();
}

// A contiguous float32 vector of `size`, or an undefined tensor where none was given.
Tensor vector(const OptionalTensor& tensor, int64_t size, const char* name, at::ScalarType dtype = at::kFloat) {
  if (!tensor || !tensor->defined()) return {};
  TORCH_CHECK_VALUE(tensor->dim() == 1 && tensor->size(0) == size, name, " has shape ", tensor->sizes(), ", expected (",
                    size, ",)");
  return checked(*tensor, dtype, name);
}

template <class T>
const T* data(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

void check_features(const Tensor& x, const PackedGemm& gemm) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == gemm.k(), "input has shape ", x.sizes(), ", expected (..., ", gemm.k(),
                    ") (in_features)");
}

std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last) {
  std::vector<int64_t> out(sizes.begin(), sizes.end());
  out.back() = last;
  return out;
}

int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return rows;
}

void check_bits(int64_t bits) {
  TORCH_CHECK_VALUE(bits == 8 || bits == 16, "activation_bits is ", bits, ", expected 8 or 16");
}

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
  Tensor y = at::empty(with_last(x.sizes(), gemm->n()), x.options());
  linear_dynamic(layer, input.const_data_ptr<float>(), gemm->k(), rows_of(input), y.mutable_data_ptr<float>());
  return y;
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

Tensor dequantize_op(const Tensor& q, double scale, int64_t zero_point) {
  const Tensor input = dense(q, at::kByte, "q");
  Tensor x = at::empty_like(input, input.options().dtype(at::kFloat));
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

RnnMode rnn_mode(c10::string_view name) {
  if (name == "lstm") return RnnMode::kLstm;
  if (name == "gru") return RnnMode::kGru;
  if (name == "rnn_tanh") return RnnMode::kTanh;
  TORCH_CHECK_VALUE(name == "rnn_relu", "mode is '", name, "', expected lstm, gru, rnn_tanh or rnn_relu");
  return RnnMode::kRelu;
}

// The rows of each step: batch_sizes, or the same number at every step.
std::vector<int64_t> step_sizes(const Tensor& x, const OptionalTensor& batch_sizes) {
  if (!batch_sizes || !batch_sizes->defined()) {
    TORCH_CHECK_VALUE(x.dim() == 3, "input has shape ", x.sizes(), ", expected (time, batch, features)");
    return std::vector<int64_t>(x.size(0), x.size(1));
  }
  TORCH_CHECK_VALUE(x.dim() == 2, "input has shape ", x.sizes(), ", expected (rows, features) with batch_sizes");
  const Tensor sizes = checked(*batch_sizes, at::kLong, "batch_sizes");
  const int64_t* first = sizes.const_data_ptr<int64_t>();
  std::vector<int64_t> out(first, first + sizes.numel());
  int64_t rows = 0;
  for (size_t t = 0; t < out.size(); ++t) {
    TORCH_CHECK_VALUE(out[t] > 0 && (t == 0 || out[t] <= out[t - 1]), "batch_sizes must be positive and never grow");
    rows += out[t];
  }
  TORCH_CHECK_VALUE(rows == x.size(0), "batch_sizes add up to ", rows, ", the input has ", x.size(0), " rows");
  return out;
}

std::tuple<Tensor, Tensor, Tensor> rnn_layer_op(
    const Tensor& x, const OptionalTensor& batch_sizes, const Tensor& h, const OptionalTensor& c,
    const Tensor& q_weight_ih, const Tensor& scale_ih, const OptionalTensor& columns_ih, int64_t activation_bits,
    bool per_row, const Tensor& q_weight_hh, const Tensor& scale_hh, const OptionalTensor& bias_ih,
    const OptionalTensor& bias_hh, const OptionalTensor& q_weight_hr, const OptionalTensor& scale_hr,
    c10::string_view mode, bool reverse, c10::string_view backend) {
  const RnnMode kind = rnn_mode(mode);
  const auto input_gemm = packed(q_weight_ih, backend), hidden_gemm = packed(q_weight_hh, backend);
  check_bits(activation_bits);
  const int64_t gates = kind == RnnMode::kLstm ? 4 : kind == RnnMode::kGru ? 3 : 1;
  const int64_t width = hidden_gemm->n(), hidden = width / gates, state = hidden_gemm->k();
  TORCH_CHECK_VALUE(width == gates * hidden && input_gemm->n() == width, "q_weight_ih has ", input_gemm->n(),
                    " rows and q_weight_hh ", width, ", expected the same multiple of ", gates);
  check_features(x, *input_gemm);
  const Tensor input = checked(x, at::kFloat, "input");
  const std::vector<int64_t> sizes = step_sizes(input, batch_sizes);
  TORCH_CHECK_VALUE(h.dim() == 2 && h.size(1) == state && (sizes.empty() || h.size(0) == sizes[0]), "h has shape ",
                    h.sizes(), ", expected (", sizes.empty() ? h.size(0) : sizes[0], ", ", state, ")");
  const int64_t batch = h.size(0);
  Tensor h_out = checked(h, at::kFloat, "h").clone();
  Tensor c_out = at::empty({0}, input.options());
  if (kind == RnnMode::kLstm) {
    TORCH_CHECK_VALUE(c && c->dim() == 2 && c->size(0) == batch && c->size(1) == hidden,
                      "an LSTM needs c of shape (", batch, ", ", hidden, ")");
    c_out = checked(*c, at::kFloat, "c").clone();
  }
  const Tensor scales_ih = vector(scale_ih, width, "scale_ih"), scales_hh = vector(scale_hh, width, "scale_hh");
  const Tensor columns = vector(columns_ih, input_gemm->k(), "columns_ih");
  Tensor input_bias = vector(bias_ih, width, "bias_ih");
  const Tensor hidden_bias = vector(bias_hh, width, "bias_hh");
  // Only the GRU multiplies its recurrent bias (by r); the others add both at once.
  if (kind != RnnMode::kGru && hidden_bias.defined())
    input_bias = input_bias.defined() ? input_bias + hidden_bias : hidden_bias;

  const int64_t rows = rows_of(input);
  Tensor gates_in = at::empty({rows, width}, input.options());
  linear_dynamic({input_gemm.get(), data<float>(scales_ih), data<float>(input_bias), data<float>(columns),
                  static_cast<int>(activation_bits), per_row, false},
                 input.const_data_ptr<float>(), input_gemm->k(), rows, gates_in.mutable_data_ptr<float>());

  std::shared_ptr<const PackedGemm> projection_gemm;
  Tensor scales_hr;
  Linear projection{};
  if (q_weight_hr && q_weight_hr->defined()) {
    projection_gemm = packed(*q_weight_hr, backend);
    TORCH_CHECK_VALUE(projection_gemm->k() == hidden && projection_gemm->n() == state, "q_weight_hr has shape ",
                      q_weight_hr->sizes(), ", expected (", state, ", ", hidden, ")");
    TORCH_CHECK_VALUE(kind == RnnMode::kLstm, "a projection (q_weight_hr) goes with mode 'lstm', not '", mode, "'");
    scales_hr = vector(scale_hr, state, "scale_hr");
    TORCH_CHECK_VALUE(scales_hr.defined(), "q_weight_hr is given without scale_hr, expected shape (", state, ",)");
    projection = {projection_gemm.get(), data<float>(scales_hr), nullptr, nullptr, 8, true, false};
  } else {
    TORCH_CHECK_VALUE(state == hidden, "h has ", state, " features and the gates ", hidden, ", with no projection");
  }
  const RnnLayer layer{kind,
                       hidden,
                       state,
                       hidden_gemm.get(),
                       data<float>(scales_hh),
                       kind == RnnMode::kGru ? data<float>(hidden_bias) : nullptr,
                       projection_gemm ? &projection : nullptr,
                       reverse};
  Tensor y = at::empty(with_last(input.sizes(), state), input.options());
  rnn_layer(layer, gates_in.const_data_ptr<float>(), sizes.data(), static_cast<int64_t>(sizes.size()), batch,
            h_out.mutable_data_ptr<float>(), kind == RnnMode::kLstm ? c_out.mutable_data_ptr<float>() : nullptr,
            y.mutable_data_ptr<float>());
  return {y, h_out, c_out};
}

std::string isa_op() { return isa_name(isa()); }
std::string bad_isa_request_op() { return bad_isa_request(); }
std::string why_not_op(c10::string_view backend) { return why_not(backend); }
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
  m.impl("rnn_layer", &rnn_layer_op);
}

// What the extension knows of itself; no tensor decides these, so they belong to no device.
TORCH_LIBRARY(octet_native, m) {
  m.def("isa() -> str", &isa_op);
  m.def("bad_isa_request() -> str", &bad_isa_request_op);
  m.def("why_not(str backend) -> str", &why_not_op);
  m.def("default_backend() -> str", &default_backend);
  m.def("route(Tensor q_weight, str backend) -> str", &route_op);
  m.def("packed_count() -> int", &packed_count);
}

}  // namespace octet

// The torch operators of recurrent layers: check the tensors, project the whole input, call the loop over time.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "core/rnn/rnn.h"
#include "torch/operands.h"
#include "torch/packed.h"

namespace octet {
namespace {

const CellKind& kind_of(c10::string_view name) {
  const CellKind* found = find_cell({name.data(), name.size()});
  if (found) return *found;
  std::string names;
  for (const CellKind* one = row_kernels().cells; one->name; ++one)
    names += (names.empty() ? "" : ", ") + std::string(one->name);
  TORCH_CHECK_VALUE(false, "mode is '", name, "', expected one of ", names);
}

// The rows of each step: batch_sizes, or the same number at every step.
std::vector<int64_t> step_sizes(const Tensor& x, const OptionalTensor& batch_sizes) {
  if (!batch_sizes || !batch_sizes->defined()) {
    TORCH_CHECK_VALUE(x.dim() == 3, "input has shape ", x.sizes(), ", expected (time, batch, features)");
    // Steps of no rows are nothing, and could be as many as anybody says.
    return std::vector<int64_t>(x.size(1) ? x.size(0) : std::min<int64_t>(x.size(0), 1), x.size(1));
  }
  TORCH_CHECK_VALUE(x.dim() == 2, "input has shape ", x.sizes(), ", expected (rows, features) with batch_sizes");
  const Tensor sizes = checked(*batch_sizes, at::kLong, "batch_sizes");
  const int64_t* first = sizes.const_data_ptr<int64_t>();
  std::vector<int64_t> out(first, first + sizes.numel());
  int64_t rows = 0;
  for (size_t t = 0; t < out.size(); ++t) {
    TORCH_CHECK_VALUE(out[t] > 0 && (t == 0 || out[t] <= out[t - 1]), "batch_sizes must be positive and never grow");
    TORCH_CHECK_VALUE(out[t] <= x.size(0) - rows, "batch_sizes add up to more than the ", x.size(0), " rows of the input");
    rows += out[t];
  }
  TORCH_CHECK_VALUE(rows == x.size(0), "batch_sizes add up to ", rows, ", the input has ", x.size(0), " rows");
  return out;
}

// What both operators have: everything but how the input is projected and where the states go.
struct RnnOperands {
  const Tensor& input;
  const OptionalTensor& batch_sizes;
  const Tensor& h;
  const OptionalTensor& c;
  const Tensor &q_weight_ih, &scale_ih, &q_weight_hh, &scale_hh;
  const OptionalTensor &bias_ih, &bias_hh, &q_weight_hr, &scale_hr;
  c10::string_view mode;
  bool reverse;
  c10::string_view backend;
};

// Operands that are checked and contiguous, and the tensors that keep them alive.
struct RnnCall {
  RnnLayer layer{};
  Linear projection{};
  std::shared_ptr<const PackedGemm> input_gemm, hidden_gemm, projection_gemm;
  Tensor h, c, scale_ih, scale_hh, scale_hr, input_bias, hidden_bias;
  std::vector<int64_t> sizes;

  int64_t width() const { return hidden_gemm->n(); }
};

std::tuple<std::shared_ptr<const PackedGemm>, Tensor> operands(const Tensor& q_weight, const Tensor& scale, const char* name,
                                                               const RnnOperands& given) {
  const Weight weight = packed_weight(q_weight, scale, name, given.backend);
  return {weight.gemm, weight.scale};
}

void take_projection(RnnCall& call, const RnnOperands& given) {
  const int64_t hidden = call.layer.hidden, state = call.layer.state;
  if (!given.q_weight_hr || !given.q_weight_hr->defined()) {
    TORCH_CHECK_VALUE(state == hidden, "h has ", state, " features and the gates ", hidden, ", with no projection");
    return;
  }
  TORCH_CHECK_VALUE(given.scale_hr && given.scale_hr->defined(), "q_weight_hr is given without scale_hr, expected shape (",
                    state, ",)");
  std::tie(call.projection_gemm, call.scale_hr) = operands(*given.q_weight_hr, *given.scale_hr, "scale_hr", given);
  TORCH_CHECK_VALUE(call.projection_gemm->k() == hidden && call.projection_gemm->n() == state, "q_weight_hr has shape ",
                    given.q_weight_hr->sizes(), ", expected (", state, ", ", hidden, ")");
  TORCH_CHECK_VALUE(call.layer.kind->projects, "mode '", given.mode, "' has no projection, expected no q_weight_hr");
  call.projection = {call.projection_gemm.get(), data<float>(call.scale_hr), nullptr, nullptr, 8, true, false};
}

// Not Tensor::clone or operator+, which cost a cell's step a microsecond: the tensors here are contiguous.
Tensor copied(const Tensor& reals) {
  Tensor copy = empty_reals(reals.sizes());
  std::copy_n(reals.const_data_ptr<float>(), reals.numel(), copy.mutable_data_ptr<float>());
  return copy;
}

Tensor sum(const Tensor& a, const Tensor& b) {
  Tensor both = copied(a);
  float* out = both.mutable_data_ptr<float>();
  std::transform(out, out + both.numel(), b.const_data_ptr<float>(), out, std::plus<>());
  return both;
}

void take_states(RnnCall& call, const RnnOperands& given) {
  const Tensor& h = given.h;
  const std::vector<int64_t>& sizes = call.sizes;
  const int64_t state = call.layer.state, hidden = call.layer.hidden;
  TORCH_CHECK_VALUE(h.dim() == 2 && h.size(1) == state && (sizes.empty() || h.size(0) == sizes[0]), "h has shape ",
                    h.sizes(), ", expected (", sizes.empty() ? h.size(0) : sizes[0], ", ", state, ")");
  call.h = copied(checked(h, at::kFloat, "h"));
  if (!call.layer.kind->has_cell) {
    call.c = empty_reals({0});
    return;
  }
  TORCH_CHECK_VALUE(given.c && given.c->dim() == 2 && given.c->size(0) == h.size(0) && given.c->size(1) == hidden,
                    "mode '", given.mode, "' needs c of shape (", h.size(0), ", ", hidden, ")");
  call.c = copied(checked(*given.c, at::kFloat, "c"));
}

// Fills `call`, which must not move afterwards: its layer points into it.
void rnn_call(RnnCall& call, const RnnOperands& given) {
  const CellKind& kind = kind_of(given.mode);
  const int64_t gates = kind.gates, width = given.q_weight_hh.dim() ? given.q_weight_hh.size(0) : 0;
  TORCH_CHECK_VALUE(width % gates == 0 && given.q_weight_ih.dim() && given.q_weight_ih.size(0) == width, "q_weight_ih has shape ",
                    given.q_weight_ih.sizes(), " and q_weight_hh ", given.q_weight_hh.sizes(),
                    ", expected rows of both that are the same multiple of ", gates);
  std::tie(call.input_gemm, call.scale_ih) = operands(given.q_weight_ih, given.scale_ih, "scale_ih", given);
  std::tie(call.hidden_gemm, call.scale_hh) = operands(given.q_weight_hh, given.scale_hh, "scale_hh", given);
  check_features(given.input, *call.input_gemm);
  call.layer.kind = &kind;
  call.layer.hidden = width / gates;
  call.layer.state = call.hidden_gemm->k();
  call.sizes = step_sizes(given.input, given.batch_sizes);
  take_states(call, given);
  call.input_bias = vector(given.bias_ih, width, "bias_ih");
  call.hidden_bias = vector(given.bias_hh, width, "bias_hh");
  if (kind.sums_biases && call.hidden_bias.defined()) {
    call.input_bias = call.input_bias.defined() ? sum(call.input_bias, call.hidden_bias) : call.hidden_bias;
    call.hidden_bias = Tensor();
  }
  take_projection(call, given);
  call.layer.hh = call.hidden_gemm.get();
  call.layer.scale_hh = data<float>(call.scale_hh);
  call.layer.bias_hh = data<float>(call.hidden_bias);
  call.layer.projection = call.projection_gemm ? &call.projection : nullptr;
  call.layer.reverse = given.reverse;
}

void run_steps(RnnCall& call, const Tensor& gates_in, RnnOutput y) {
  rnn_layer(call.layer, gates_in.const_data_ptr<float>(), call.sizes.data(), static_cast<int64_t>(call.sizes.size()),
            call.h.size(0), call.h.mutable_data_ptr<float>(),
            call.layer.kind->has_cell ? call.c.mutable_data_ptr<float>() : nullptr, y);
}

std::tuple<Tensor, Tensor, Tensor> rnn_layer_op(
    const Tensor& x, const OptionalTensor& batch_sizes, const Tensor& h, const OptionalTensor& c,
    const Tensor& q_weight_ih, const Tensor& scale_ih, const OptionalTensor& columns_ih, int64_t activation_bits,
    bool per_row, const Tensor& q_weight_hh, const Tensor& scale_hh, const OptionalTensor& bias_ih,
    const OptionalTensor& bias_hh, const OptionalTensor& q_weight_hr, const OptionalTensor& scale_hr,
    c10::string_view mode, bool reverse, c10::string_view backend) {
  check_bits(activation_bits);
  const Tensor input = checked(x, at::kFloat, "input");
  RnnCall call;
  rnn_call(call, {input, batch_sizes, h, c, q_weight_ih, scale_ih, q_weight_hh, scale_hh, bias_ih, bias_hh, q_weight_hr,
                  scale_hr, mode, reverse, backend});
  const Tensor columns = vector(columns_ih, call.input_gemm->k(), "columns_ih");
  const int64_t rows = rows_of(input);
  Tensor gates_in = empty_reals({rows, call.width()});
  linear_dynamic({call.input_gemm.get(), data<float>(call.scale_ih), data<float>(call.input_bias), data<float>(columns),
                  static_cast<int>(activation_bits), per_row, false},
                 input.const_data_ptr<float>(), call.input_gemm->k(), rows, gates_in.mutable_data_ptr<float>());
  Tensor y = empty_reals(with_last(input.sizes(), call.layer.state));
  RnnOutput output;
  output.reals = y.mutable_data_ptr<float>();
  run_steps(call, gates_in, output);
  return {y, call.h, call.c};
}

std::tuple<Tensor, Tensor, Tensor> rnn_layer_static_op(
    const Tensor& q_x, double x_scale, int64_t x_zero_point, const OptionalTensor& batch_sizes, const Tensor& h,
    const OptionalTensor& c, const Tensor& q_weight_ih, const Tensor& scale_ih, const Tensor& q_weight_hh,
    const Tensor& scale_hh, const OptionalTensor& bias_ih, const OptionalTensor& bias_hh, double h_scale,
    int64_t h_zero_point, const OptionalTensor& q_weight_hr, const OptionalTensor& scale_hr, double m_scale,
    int64_t m_zero_point, c10::string_view mode, bool reverse, bool quantized, c10::string_view backend) {
  const Tensor input = checked(q_x, at::kByte, "q_x");
  RnnCall call;
  rnn_call(call, {input, batch_sizes, h, c, q_weight_ih, scale_ih, q_weight_hh, scale_hh, bias_ih, bias_hh, q_weight_hr,
                  scale_hr, mode, reverse, backend});
  TORCH_CHECK_VALUE(call.scale_ih.defined(), "scale_ih has scales by group, which a static recurrent layer has no kernel for");
  const RowRange state_range{static_cast<float>(h_scale), checked_byte(h_zero_point, "h_zero_point")};
  const RowRange projection_range{static_cast<float>(m_scale), checked_byte(m_zero_point, "m_zero_point")};
  call.layer.state_range = &state_range;
  call.layer.projection_range = &projection_range;
  const auto reals = call.h.options();
  const int64_t rows = rows_of(input);
  Tensor gates_in = empty_reals({rows, call.width()});
  linear_reals(*call.input_gemm, input.const_data_ptr<uint8_t>(), rows,
               {static_cast<float>(x_scale), checked_byte(x_zero_point, "x_zero_point")}, data<float>(call.scale_ih),
               data<float>(call.input_bias), gates_in.mutable_data_ptr<float>());
  Tensor y = at::empty(with_last(input.sizes(), call.layer.state), quantized ? reals.dtype(at::kByte) : reals);
  RnnOutput output;
  if (quantized)
    output.quantized = y.mutable_data_ptr<uint8_t>();
  else
    output.reals = y.mutable_data_ptr<float>();
  run_steps(call, gates_in, output);
  return {y, call.h, call.c};
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("rnn_layer", &Defined<&rnn_layer_op>::call);
  m.impl("rnn_layer_static", &Defined<&rnn_layer_static_op>::call);
}

}  // namespace octet

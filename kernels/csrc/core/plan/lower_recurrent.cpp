// Recurrent layers: the input projection of all steps, then the loop over time. The final states are buffers of their own.
#include <algorithm>
#include <functional>

#include "core/plan/lower.h"
#include "core/rnn/rnn.h"

namespace octet {
namespace {

using Reals = std::shared_ptr<const std::vector<float>>;

const float* data(const Reals& values) { return values ? values->data() : nullptr; }

// A layer's weights, held by its step.
struct Weights {
  std::shared_ptr<const PackedGemm> ih, hh, hr;  // hr is null where there is no projection
  Reals scale_ih, scale_hh, scale_hr, input_bias, hidden_bias, columns;
  int64_t hidden, state;
};

// The bias of the input projection, which has that of the states too where a kind adds them.
Reals summed(const Reals& one, const Reals& other) {
  if (!one || !other) return one ? one : other;
  auto both = std::make_shared<std::vector<float>>(*one);
  std::transform(both->begin(), both->end(), other->begin(), both->begin(), std::plus<>());
  return both;
}

void take_projection(const PlanBuilder& b, const Operation& operation, const op::Recurrent& by, Weights& weights) {
  if (by.weight_hr == kNoConstant) {
    expect(operation, weights.state == weights.hidden, "its states have another size than its gates, and no projection");
    return;
  }
  const Sizes sizes = weight_sizes(b, operation, by.weight_hr, "q_weight_hr");
  expect(operation, by.kind->projects, "its kind has no projection");
  expect(operation, sizes[0] == weights.state && sizes[1] == weights.hidden, "q_weight_hr has other sizes");
  weights.scale_hr = required_reals(b, operation, by.scale_hr, "scale_hr", weights.state);
  weights.hr = b.weights().gemm(by.weight_hr, 0, 0);
}

Weights weights_of(const PlanBuilder& b, const Operation& operation, const op::Recurrent& by, int64_t features) {
  const Sizes ih = weight_sizes(b, operation, by.weight_ih, "q_weight_ih"), hh = weight_sizes(b, operation, by.weight_hh, "q_weight_hh");
  const int64_t width = hh[0];
  expect_or(operation, width % by.kind->gates == 0 && ih[0] == width,
            [&] { return "its weights have not the same multiple of " + std::to_string(by.kind->gates) + " rows"; });
  expect_or(operation, ih[1] == features,
            [&] { return "the input has " + std::to_string(features) + " features, expected " + std::to_string(ih[1]); });
  Weights weights{};
  weights.hidden = width / by.kind->gates, weights.state = hh[1];
  weights.scale_ih = required_reals(b, operation, by.scale_ih, "scale_ih", width);
  weights.scale_hh = required_reals(b, operation, by.scale_hh, "scale_hh", width);
  weights.input_bias = b.reals(operation, by.bias_ih, "bias_ih", width);
  weights.hidden_bias = b.reals(operation, by.bias_hh, "bias_hh", width);
  weights.columns = b.reals(operation, by.columns, "columns_ih", features);
  if (by.kind->sums_biases) weights.input_bias = summed(weights.input_bias, weights.hidden_bias), weights.hidden_bias = nullptr;
  take_projection(b, operation, by, weights);
  weights.ih = b.weights().gemm(by.weight_ih, 0, 0), weights.hh = b.weights().gemm(by.weight_hh, 0, 0);
  return weights;
}

// A state that is carried through the steps: where it begins, where there is such a value, and its buffer.
struct State {
  PlanView first, at;
  bool given;

  // False where a first state is to be rounded and is not finite.
  bool begin(const PlanFrame& frame) const {
    if (!given) {
      std::fill_n(at.reals_out(frame), at.count(), 0.0f);
      return true;
    }
    std::copy_n(first.reals(frame), at.count(), at.reals_out(frame));
    return row_kernels().all_finite(at.reals(frame), at.count());
  }
};

State state_of(PlanBuilder& b, const Operation& operation, Value given, const Sizes& sizes, const char* name) {
  State state{{}, b.fresh(sizes, plain_strides(sizes), true), given != kNoValue};
  if (!state.given) return state;
  state.first = b.plain(real_input(b, operation, given));
  expect_or(operation, state.first.sizes == sizes, [&] { return std::string(name) + " has other sizes"; });
  return state;
}

void project_input(const op::Recurrent& by, const Weights& weights, const PlanView& x, int64_t rows, const PlanFrame& frame,
                   float* gates) {
  if (by.ranges)
    return linear_reals(*weights.ih, x.bytes(frame), rows, by.ranges->input, data(weights.scale_ih), data(weights.input_bias), gates);
  const Linear layer{weights.ih.get(), data(weights.scale_ih), data(weights.input_bias), data(weights.columns), by.bits, by.per_row,
                     false};
  linear_dynamic(layer, x.reals(frame), weights.ih->k(), rows, gates);
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Recurrent& by) {
  const PlanView x = b.plain(by.ranges ? b.input(by.x) : real_input(b, operation, by.x));
  if (by.ranges) expect_dtype(operation, x, false);
  expect(operation, x.rank() == 3, "its input is not (time, batch, features)");
  expect(operation, by.bits == 8 || by.bits == 16, "its activations have neither 8 nor 16 bits");
  const int64_t steps = x.sizes[0], batch = x.sizes[1];
  const Weights weights = weights_of(b, operation, by, x.sizes[2]);
  const Sizes sizes{steps, batch, weights.state}, gate_sizes{steps, batch, weights.hh->n()};
  checked_count(operation, sizes), checked_count(operation, gate_sizes);
  expect(operation, by.kind->has_cell || by.c == kNoValue, "its kind has no c");
  const State h = state_of(b, operation, by.h, {batch, weights.state}, "h");
  std::vector<State> states{h};
  if (by.kind->has_cell) states.push_back(state_of(b, operation, by.c, {batch, weights.hidden}, "c"));
  const PlanView gates = b.fresh(gate_sizes, plain_strides(gate_sizes), true);
  const PlanView y = b.fresh(sizes, plain_strides(sizes), !by.ranges || !by.ranges->integers);
  // Its own buffers live through the step, as what it reads does.
  std::vector<const PlanView*> reads{&x, &gates};
  std::vector<PlanView> finals;
  for (const State& state : states) {
    reads.push_back(&state.at);
    if (state.given) reads.push_back(&state.first);
    finals.push_back(state.at);
  }
  b.keep_states(operation.out, finals);
  b.emit(reads, y, [=](const PlanFrame& frame) {
    for (const State& state : states)
      if (const bool finite = state.begin(frame); by.ranges) frame.met(finite);
    if (steps * batch == 0) return;
    float* const projected = gates.reals_out(frame);
    project_input(by, weights, x, steps * batch, frame, projected);
    const Linear projection{weights.hr.get(), data(weights.scale_hr), nullptr, nullptr, 8, true, false};
    const RnnLayer layer{by.kind,
                         weights.hidden,
                         weights.state,
                         weights.hh.get(),
                         data(weights.scale_hh),
                         data(weights.hidden_bias),
                         weights.hr ? &projection : nullptr,
                         by.reverse,
                         by.ranges ? &by.ranges->state : nullptr,
                         by.ranges ? &by.ranges->projection : nullptr};
    const std::vector<int64_t> rows(steps, batch);
    RnnOutput output;
    if (y.real)
      output.reals = y.reals_out(frame);
    else
      output.quantized = y.bytes_out(frame);
    rnn_layer(layer, projected, rows.data(), steps, batch, h.at.reals_out(frame),
              states.size() > 1 ? states[1].at.reals_out(frame) : nullptr, output);
  });
  return y;
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::FinalState& by) {
  const std::vector<PlanView>* const states = b.states(by.y);
  expect(operation, states != nullptr, "what it reads is no recurrent layer");
  expect(operation, !by.cell || states->size() > 1, "the recurrent layer's kind has no c");
  return (*states)[by.cell];
}

}  // namespace octet

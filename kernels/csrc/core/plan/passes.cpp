#include "core/plan/passes.h"

#include <algorithm>

namespace octet {
namespace {

// fn(operation, its fields) for every operation of one kind.
template <class Kind, class Fn>
void each(Program& program, Fn fn) {
  for (Operation& operation : program.operations)
    if (Kind* const kind = std::get_if<Kind>(&operation.kind)) fn(operation, *kind);
}

template <class Kind>
bool is(const Program& program, Place place) {
  return place != kNowhere && program.operations[place].as<Kind>();
}

template <class Kind>
Place first_reader(const Program& program, const Uses& uses, Value value) {
  for (const Place place : uses.readers[value])
    if (is<Kind>(program, place)) return place;
  return kNowhere;
}

}  // namespace

Uses::Uses(const Program& program) : readers(program.values()), given_out(program.values(), false) {
  for (size_t place = 0; place < program.operations.size(); ++place)
    for (const Value value : program.operations[place].reads) readers[value].push_back(static_cast<Place>(place));
  for (const Value value : program.outputs) given_out[value] = true;
}

Place Uses::only_reader(Value value) const {
  return given_out[value] || readers[value].size() != 1 ? kNowhere : readers[value][0];
}

void find_sums_of_convolutions(Program& program, const Uses& uses) {
  each<op::Conv>(program, [&](const Operation& operation, op::Conv& conv) {
    const Place reader = uses.only_reader(operation.out);
    if (!conv.finish.real && is<op::Add>(program, reader)) conv.sum = reader;
  });
}

void find_sums_and_roundings_of_norms(Program& program, const Uses& uses) {
  each<op::AddReal>(program, [&](const Operation& operation, op::AddReal& add) {
    const Place reader = uses.only_reader(operation.out);
    if (is<op::LayerNorm>(program, reader)) add.norm = reader;
  });
  each<op::LayerNorm>(program, [&](const Operation& operation, op::LayerNorm& norm) {
    norm.rounding = first_reader<op::Quantize>(program, uses, operation.out);
  });
  each<op::Softmax>(program, [&](const Operation& operation, op::Softmax& softmax) {
    softmax.rounding = first_reader<op::Quantize>(program, uses, operation.out);
  });
}

void find_layouts(Program& program, const Uses& uses) {
  each<op::Quantize>(program, [&](const Operation& operation, op::Quantize& quantize) {
    quantize.for_linear = first_reader<op::Linear>(program, uses, operation.out) != kNowhere ||
                          first_reader<op::Matmul>(program, uses, operation.out) != kNowhere;
  });
  each<op::Dequantize>(program, [&](const Operation& operation, op::Dequantize& dequantize) {
    dequantize.given_out = uses.given_out[operation.out];
  });
  each<op::Conv>(program, [&](const Operation& operation, op::Conv& conv) { conv.given_out = uses.given_out[operation.out]; });
  each<op::Matmul>(program, [&](const Operation& operation, op::Matmul& matmul) {
    const Place reader = uses.only_reader(operation.out);
    matmul.turned = is<op::Transpose>(program, reader) || is<op::Permute>(program, reader);
  });
}

void run_passes(Program& program) {
  const Uses uses(program);
  find_sums_of_convolutions(program, uses);
  find_sums_and_roundings_of_norms(program, uses);
  find_layouts(program, uses);
}

}  // namespace octet

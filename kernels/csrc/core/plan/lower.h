// The operations of a program, each lowered to steps. kernels/reference_plan.py names them; their meaning is that of
// kernels/reference_ops.py.
#pragma once

#include <string>

#include "core/plan/builder.h"
#include "core/plan/ir.h"
#include "core/rows/elementwise.h"
#include "core/rows/reals.h"

namespace octet {

// Emits the steps of an operation and returns the view of its result.
PlanView lower(PlanBuilder& b, const Operation& operation);

// lower_values.cpp: elementwise operations.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Quantize& quantize);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Dequantize& dequantize);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Clamp& clamp);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Lookup& lookup);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Add& add);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Binary& binary);
// lower_layers.cpp: convolutions and linear layers.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Conv& conv);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Linear& linear);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::DynamicLinear& linear);
// lower_lookups.cpp: rows of tables.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Embedding& embedding);
// lower_indices.cpp: parts that indices choose.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::IndexSelect& select);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::IndexAdd& add);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::ScatterAdd& add);
// lower_recurrent.cpp: recurrent layers, and their states.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Recurrent& layer);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::FinalState& state);
// lower_windows.cpp: pooling and means.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::MaxPool& pool);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::AvgPool& pool);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::AdaptivePool& pool);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Mean& mean);
// lower_resize.cpp: resizing.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Interpolate& interpolate);
// lower_moves.cpp: operations that only move values, padding included.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Pad& pad);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Cat& cat);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Reshape& reshape);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Flatten& flatten);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Permute& permute);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Transpose& transpose);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Unsqueeze& unsqueeze);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Squeeze& squeeze);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Slice& slice);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Select& select);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Chunk& chunk);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Same& same);
// lower_reals.cpp: operations computed in float32.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::AddReal& add);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::LayerNorm& norm);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Attention& attention);
// lower_functions.cpp: functions, sums and choices of reals.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Silu& silu);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::UnaryReal& unary);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::ReduceReal& reduce);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::WhereReal& where);
// lower_norms.cpp: norms over channels and pixels, and by the root mean square.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::RmsNorm& norm);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::GroupNorm& norm);

// lower_sizes.cpp: what sizes decide.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Expand& expand);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Holds& holds);
// lower_arithmetic.cpp: arithmetic of reals, their softmax, concatenations and constants.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::ConstantReal& constant);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::WithNumber& by);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::BinaryReal& by);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::CatReal& cat);
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Softmax& softmax);
// lower_matmul.cpp: products of two activations.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Matmul& matmul);

// A float view, quantised.
PlanView quantized(PlanBuilder& b, const Operation& operation, const op::Quantize& quantize, const PlanView& x);
// The strides of its integers: those that a linear layer reads, else channels last.
Sizes rounded_strides(const op::Quantize& quantize, const Sizes& sizes);

// out[i, j, ...] = x[sources[0][i], sources[1][j], ...], and `fill` where a source is -1.
PlanView gathered(PlanBuilder& b, const PlanView& x, const std::vector<Sizes>& sources, uint8_t fill);

// table[x] for every value.
PlanView looked_up(PlanBuilder& b, const PlanView& x, std::shared_ptr<const std::vector<uint8_t>> table);

// Fails with `what` unless the condition holds; formatting costs nothing where it does.
inline void expect(const Operation& operation, bool holds, const char* what) {
  if (!holds) operation.fail(what);
}
template <class Words>
void expect_or(const Operation& operation, bool holds, Words words) {
  if (!holds) operation.fail(words());
}
void expect_dtype(const Operation& operation, const PlanView& view, bool real);
// left and right, broadcast, by an exact kernel of two reals.
PlanView combined(PlanBuilder& b, PlanView left, PlanView right, const Sizes& sizes, RealBinary kernel);
// The float view of a value.
PlanView real_input(PlanBuilder& b, const Operation& operation, Value value);
// (N, K) of a weight of bytes or of few bits (kernels/narrow.py).
Sizes product_sizes(const PlanBuilder& b, const Operation& operation, Constant weight, const char* name);
// The same; fails where it is empty.
Sizes weight_sizes(const PlanBuilder& b, const Operation& operation, Constant weight, const char* name);
// A vector of `count` values that has to be there.
std::shared_ptr<const std::vector<float>> required_reals(const PlanBuilder& b, const Operation& operation, Constant index,
                                                         const char* name, int64_t count);
// The number that a size is; fails where its arithmetic has no result.
int64_t number_of(PlanBuilder& b, const Operation& operation, const SizeParts& size);
// The product of the sizes of a tensor; fails where it exceeds all memory.
int64_t checked_count(const Operation& operation, const Sizes& sizes);
// The padding before and after each dimension, of a pad's widths; fails where they do not fit the input.
struct Widths {
  Sizes before, after;
};
Widths widths_of(const Operation& operation, const op::Pad& pad, const PlanView& x);
// The shape of the result of two views, which get as many dimensions as it has.
Sizes broadcast(const Operation& operation, PlanView& left, PlanView& right);
// The strides of a view broadcast to a larger shape.
Sizes repeated(const PlanView& view, const Sizes& sizes);
// A dimension counted from the front; fails where it does not exist.
int64_t dimension(const Operation& operation, int64_t dim, int64_t rank);

}  // namespace octet

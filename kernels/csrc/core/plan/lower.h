// The operators of a plan's text, each lowered to steps. kernels/reference_plan.py names them; their meaning is that of
// kernels/reference_ops.py.
#pragma once

#include <map>
#include <string>

#include "core/plan/builder.h"
#include "core/rows/elementwise.h"

namespace octet {

// Emits the steps of one line and returns the view of its result.
PlanView lower(PlanBuilder& b, const PlanLine& line);

using PlanOperators = std::map<std::string, PlanView (*)(PlanBuilder&, const PlanLine&), std::less<>>;
const PlanOperators& value_operators();   // what computes value by value
const PlanOperators& layer_operators();   // convolutions and linear layers
const PlanOperators& window_operators();  // pooling and means
const PlanOperators& move_operators();    // what only moves values, padding and resizing among it
const PlanOperators& real_operators();    // what is computed in float32

// A real view, rounded by the line's scale and zero point.
PlanView quantized(PlanBuilder& b, const PlanLine& line, const PlanView& x);

// table[x] for every value.
PlanView looked_up(PlanBuilder& b, const PlanView& x, std::shared_ptr<std::vector<uint8_t>> table);

void expect(const PlanLine& line, bool holds, const std::string& what);
void expect_dtype(const PlanLine& line, const PlanView& view, bool real);
// The product of the sizes of a tensor; fails where it is beyond all memory.
int64_t checked_count(const PlanLine& line, const Sizes& sizes);
// Per dimension what a line's widths put before and after; fails where they do not fit the input.
struct Widths {
  Sizes before, after;
};
Widths widths_of(const PlanLine& line, const PlanView& x);
// A setting in [0, 255].
int32_t byte(const PlanLine& line, std::string_view name);
// The shape of the result of two views, which get as many dimensions as it has.
Sizes broadcast(const PlanLine& line, PlanView& left, PlanView& right);
// The strides with which a view repeats over a larger shape.
Sizes repeated(const PlanView& view, const Sizes& sizes);
// The settings of a line that adds two quantised values.
AddSettings add_settings(const PlanLine& line);
// A dimension counted from the front; fails where there is none.
int64_t dimension(const PlanLine& line, int64_t dim, int64_t rank);

}  // namespace octet

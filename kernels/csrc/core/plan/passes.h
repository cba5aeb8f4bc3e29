// What operations may do for each other, found along chains of definitions and uses. Passes need no shapes: they write what
// may be done into the operations' fields marked `pass`, and lowering does it where the shapes allow.
#pragma once

#include <vector>

#include "core/plan/ir.h"

namespace octet {

// Who reads each value, by place, once for each mention; and which values are outputs.
struct Uses {
  explicit Uses(const Program& program);
  std::vector<std::vector<Place>> readers;
  std::vector<bool> given_out;

  // The only reader of a value that is no output, or kNowhere.
  Place only_reader(Value value) const;
};

// An Add that alone reads a convolution's outputs may be computed with them.
void find_sums_of_convolutions(Program& program, const Uses& uses);
// An AddReal that only a LayerNorm reads may be formed there, row by row, and a rounding of its result in the same pass.
void find_sums_and_roundings_of_norms(Program& program, const Uses& uses);
// How integers are best laid for a linear layer, and reals that are outputs.
void find_layouts(Program& program, const Uses& uses);

// All of them.
void run_passes(Program& program);

}  // namespace octet

// Passes over chains of definitions and uses, which find operations that can be computed together. They need no shapes: they
// set the operations' fields marked `pass`, and lowering fuses where the shapes allow.
#pragma once

#include <vector>

#include "core/plan/ir.h"

namespace octet {

// The readers of each value, by place, once for each use; and which values are outputs.
struct Uses {
  explicit Uses(const Program& program);
  std::vector<std::vector<Place>> readers;
  std::vector<bool> given_out;

  // The only reader of a value that is not an output, or kNowhere.
  Place only_reader(Value value) const;
};

// An Add that is a convolution's only consumer may be computed with its outputs.
void find_sums_of_convolutions(Program& program, const Uses& uses);
// An AddReal whose only consumer is a LayerNorm may be computed there row by row, and a Quantize of the result too.
void find_sums_and_roundings_of_norms(Program& program, const Uses& uses);
// The memory order of integers for linear layers, and of float outputs.
void find_layouts(Program& program, const Uses& uses);

// Runs all passes.
void run_passes(Program& program);

}  // namespace octet

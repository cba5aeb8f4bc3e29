// A recurrent layer over any PackedGemm: one direction over a whole sequence, with ranges per row or known beforehand.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/gemm/linear.h"

namespace octet {

// The kind of a name (core/rows/cells.inc) for this CPU, or null.
const CellKind* find_cell(std::string_view name);

struct RnnLayer {
  const CellKind* kind;
  int64_t hidden;        // of the gates
  int64_t state;         // of h: hidden, or the projection's size
  const PackedGemm* hh;  // (gates * hidden, state)
  const float* scale_hh;     // null of a GroupedGemm
  const float* bias_hh;      // null for a kind that sums biases, which has it in the input projection
  const Linear* projection;  // of what a step gives, or null
  bool reverse;
  const RowRange* state_range;       // of every state, known beforehand; null: per row, anew at every step
  const RowRange* projection_range;  // likewise, of what the projection reads
};

// Where the states of every step go, (rows, state): exactly one is set.
struct RnnOutput {
  float* reals = nullptr;
  uint8_t* quantized = nullptr;  // by state_range, which must be given
};

// One direction of one layer over a whole sequence. Step t holds rows [offset of t, + sizes[t]) of `input`, the input
// projection (rows, gates * hidden) with its bias, and of y (rows, state). sizes never grow with t, as in PackedSequence.
// h (batch, state) and c (batch, hidden) hold the initial state and receive the final one.
void rnn_layer(const RnnLayer& layer, const float* input, const int64_t* sizes, int64_t steps, int64_t batch, float* h,
               float* c, RnnOutput y);

}  // namespace octet

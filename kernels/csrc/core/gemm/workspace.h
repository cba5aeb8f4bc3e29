// What whole layers share: buffers of the calling thread, and how static sums leave.
#pragma once

#include <cstdint>

#include "core/cpu/scratch.h"
#include "core/cpu/threads.h"
#include "core/gemm/linear.h"
#include "core/rows/requantize.h"

namespace octet {

struct Workspace {
  Scratch<uint8_t> q, q_low;
  Scratch<int32_t> sums, sums_low;
  Scratch<RowRange> ranges;
  Scratch<float> hidden;
  // What requantises a channel.
  Scratch<int32_t> offset;
  Scratch<float> multiplier;
};

// The calling thread's buffers. Two levels, because an LSTM's projection runs inside its step.
Workspace& workspace(int level = 0);

// The range of one row of x * columns (columns may be null), for integers [0, top].
RowRange range_of(const float* x, const float* columns, int64_t k, int top);

// The linear layer of m rows at once; `shared` is the range of all of them, or null for one per row.
void linear_rows(const Linear& layer, const RowRange* shared, const float* x, int64_t ldx, int64_t m, float* y,
                 int64_t threads, Workspace& space);

// Sums of output row `index` (n values) to where `output` wants them: zero point removed, bias added, scaled.
void finish_row(const StaticOutput& output, int32_t* sums, int64_t index, int64_t n, int32_t zero_point,
                const int32_t* row_sums, const int32_t* bias);

// Writes the outputs [first, first + count) of a layer with a residual: `own` with it added.
void add_residual(const StaticOutput& output, const uint8_t* own, int64_t first, int64_t count);

// Whether threads share the outputs of a product rather than its rows, so that each weight goes to one core.
bool outputs_are_shared(const PackedGemm& gemm, int64_t products);

// The largest of the magnitudes; NaN where one is.
float largest(const float* multiplier, int64_t n);

// How `output` requantises raw sums, in arrays of the calling thread's workspace that hold until its next call.
Requantize requantize_of(const StaticOutput& output, int64_t n, int32_t zero_point, const int32_t* row_sums,
                         const int32_t* bias);

}  // namespace octet

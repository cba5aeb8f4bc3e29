// A convolution that is under way: what it works on, and how its outputs leave. Shared by the ways that it can go.
#pragma once

#include "core/conv/conv.h"
#include "core/conv/conv_workspace.h"
#include "core/gemm/workspace.h"

namespace octet {

// What a call of conv_static works on.
struct ConvCall {
  const ConvShape& shape;
  const uint8_t* q_x;
  int32_t zero_point;
  const int32_t* bias;
  const StaticOutput& output;

  int64_t products() const { return shape.pixels() * shape.out_channels * shape.taps() * shape.channels / shape.groups; }
};

inline Requantize requantize_of(const ConvCall& call, const int32_t* row_sums) {
  return requantize_of(call.output, call.shape.out_channels, call.zero_point, row_sums, call.bias);
}

// Whether kernels that add a residual with their outputs can add this one, if there is one.
inline bool adds(const ConvCall& call) { return !call.output.residual || call.output.residual->by.fits(); }

// run(by, to) by a kernel that adds residuals, for output pixels from `first` on.
template <class Run>
void leave_added(const ConvCall& call, const Requantize& plain, int64_t first, Run run) {
  Requantize by = plain;
  Residual residual;
  const int64_t skipped = first * call.shape.out_channels;
  if (call.output.residual) {
    residual = *call.output.residual;
    residual.other += skipped;
    by.residual = &residual;
  }
  run(by, call.output.quantized + skipped);
}

// run(to) leaves channels [begin, end) of output pixels [first, first + rows) at `to`, whose rows are those of the outputs:
// there, or where a residual is added on the way. That may lie where the outputs go, and is read after they are computed.
template <class Run>
void leave(const ConvCall& call, int64_t first, int64_t rows, int64_t begin, int64_t end, Run run) {
  const int64_t outputs = call.shape.out_channels;
  if (begin == end) return;
  if (!call.output.residual) return run(call.output.quantized ? call.output.quantized + first * outputs : nullptr);
  uint8_t* own = conv_workspace().unsummed.get(rows * outputs);
  run(own);
  if (end - begin == outputs) return add_residual(call.output, own, first * outputs, rows * outputs);
  for (int64_t i = 0; i < rows; ++i)
    add_residual(call.output, own + i * outputs + begin, (first + i) * outputs + begin, end - begin);
}

}  // namespace octet

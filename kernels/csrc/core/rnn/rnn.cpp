#include "core/rnn/rnn.h"

#include <algorithm>
#include <vector>

#include "core/gemm/workspace.h"

namespace octet {
namespace {

// The whole sequence for batch rows [first, last): nothing is shared with other rows, so no thread waits for another.
void rnn_rows(const RnnLayer& layer, const float* input, const int64_t* sizes, const int64_t* offsets, int64_t steps,
              int64_t first, int64_t last, int64_t threads, float* h, float* c, RnnOutput y) {
  Workspace& space = workspace();
  const RowKernels& kernels = row_kernels();
  const int64_t width = layer.kind->gates * layer.hidden, state = layer.state, ldq = padded_row(state);
  const int64_t most = last - first;
  uint8_t* q = space.q.get(most * ldq);
  int32_t* sums = space.sums.get(most * width);
  RowRange* ranges = space.ranges.get(most);
  // The states after a step, where no output keeps them as floats, and behind them what a projection reads.
  float* states = space.hidden.get(most * (state + layer.hidden));
  float* unprojected = states + most * state;
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t t = layer.reverse ? steps - 1 - s : s;
    const int64_t rows = std::clamp<int64_t>(sizes[t] - first, 0, most);
    if (rows == 0) continue;
    for (int64_t b = 0; b < rows; ++b) {
      const float* before = h + (first + b) * state;
      ranges[b] = layer.state_range ? *layer.state_range : range_of(before, nullptr, state, 255);
      kernels.quantize(before, nullptr, state, ranges[b], 255, q + b * ldq, nullptr);
    }
    // Forwards and backwards in turn. A weight that is larger than the L2 cache is evicted in the order that it was read
    // in: a step that began where the last one did would find none of it.
    const auto product = s % 2 ? &PackedGemm::run_backwards : &PackedGemm::run;
    each_thread(threads, [&](int64_t thread) {
      (layer.hh->*product)(q, ldq, rows, sums, width, static_cast<int>(thread), static_cast<int>(threads));
    });
    const int64_t row0 = offsets[t] + first;
    float* after = y.reals ? y.reals + row0 * state : states;
    const Channels channels{layer.hh->n(), layer.hh->row_sums(), layer.scale_hh, layer.bias_hh};
    for (int64_t b = 0; b < rows; ++b)
      layer.kind->step(input + (row0 + b) * width, sums + b * width, ranges[b], channels, layer.hidden,
                       h + (first + b) * state, c ? c + (first + b) * layer.hidden : nullptr,
                       layer.projection ? unprojected + b * layer.hidden : after + b * state);
    if (layer.projection)
      linear_rows(*layer.projection, layer.projection_range, unprojected, layer.hidden, rows, after, threads,
                  workspace(1));
    std::copy_n(after, rows * state, h + first * state);
    if (y.quantized)
      kernels.quantize(after, nullptr, rows * state, *layer.state_range, 255, y.quantized + row0 * state, nullptr);
  }
}

}  // namespace

const CellKind* find_cell(std::string_view name) {
  for (const CellKind* one = row_kernels().cells; one->name; ++one)
    if (name == one->name) return one;
  return nullptr;
}

void rnn_layer(const RnnLayer& layer, const float* input, const int64_t* sizes, int64_t steps, int64_t batch, float* h,
               float* c, RnnOutput y) {
  std::vector<int64_t> offsets(steps);
  int64_t rows = 0;
  for (int64_t t = 0; t < steps; ++t) {
    offsets[t] = rows;
    rows += sizes[t];
  }
  if (rows == 0) return;
  const int64_t products = batch * layer.hh->n() * layer.hh->k();
  const int64_t threads = threads_for(products);
  if (threads == 1 || batch < 4 * threads)
    return rnn_rows(layer, input, sizes, offsets.data(), steps, 0, batch, threads, h, c, y);
  each_thread(threads, [&](int64_t thread) {
    rnn_rows(layer, input, sizes, offsets.data(), steps, batch * thread / threads, batch * (thread + 1) / threads, 1, h,
             c, y);
  });
}

}  // namespace octet

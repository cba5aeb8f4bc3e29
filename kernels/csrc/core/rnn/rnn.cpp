#include "core/rnn/rnn.h"

#include <algorithm>
#include <vector>

#include "core/cpu/team.h"
#include "core/gemm/workspace.h"

namespace octet {
namespace {

struct Sequence {
  const float* input;
  const int64_t *sizes, *offsets;
  int64_t steps;
  float *h, *c;
  RnnOutput y;
};

// A part of the outputs of a product, or of the units or states that they become.
struct Part {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Whole vectors of `size` for each member.
Part part_of(int64_t size, const Member& member) {
  const auto first = [&](int64_t thread) { return thread == member.threads ? size : size * thread / member.threads / 16 * 16; };
  return {first(member.thread), first(member.thread + 1)};
}

// Whether the products' own division into gates * members shares ends where each gate's units do: then a member computes the
// products of all gates of its units, and waits for nobody between them.
bool gates_are_whole(const RnnLayer& layer, int64_t members) {
  const int gates = static_cast<int>(layer.kind->gates), threads = static_cast<int>(members), shares = gates * threads;
  if (threads == 1) return false;
  for (int share = 0; share <= shares; ++share) {
    const int64_t unit = layer.hh->first_output(share % threads, shares);
    if (unit < 0 || layer.hh->first_output(share, shares) != share / threads * layer.hidden + unit) return false;
  }
  return true;
}

// What one member computes of rows [first, last) over the whole sequence. Members read each other's `states` and `unprojected`
// alone, which are the caller's.
class RowsOfMember {
 public:
  struct Shared {
    float* states[2];  // after steps in turn: what others still read is not written; the same for one member
    float* after;      // those of a step, where no output keeps them as floats
    float* unprojected;
    int32_t *sums, *projection_sums;
  };

  RowsOfMember(const RnnLayer& layer, const Sequence& sequence, int64_t first, int64_t last, const Shared& shared,
               const Member& member)
      : layer_(layer),
        sequence_(sequence),
        first_(first),
        most_(last - first),
        shared_(shared),
        member_(member),
        whole_gates_(gates_are_whole(layer, member.threads)) {
    const int threads = static_cast<int>(member.threads), shares = static_cast<int>(layer.kind->gates) * threads;
    const auto first_unit = [&](int64_t thread) {
      return thread == threads ? layer.hidden : layer.hh->first_output(static_cast<int>(thread), shares);
    };
    units_ = whole_gates_ ? Part{first_unit(member.thread), first_unit(member.thread + 1)} : part_of(layer.hidden, member);
    states_ = layer.projection ? part_of(layer.state, member) : units_;
    ld_ = padded_row(std::max(layer.state, layer.hidden));
    q_ = workspace().q.get(most_ * ld_);
    ranges_ = workspace().ranges.get(most_);
  }

  void run() {
    for (int64_t s = 0, turn = 0; s < sequence_.steps; ++s) {
      const int64_t t = layer_.reverse ? sequence_.steps - 1 - s : s;
      const int64_t rows = std::clamp<int64_t>(sequence_.sizes[t] - first_, 0, most_);
      if (rows == 0) continue;
      step(sequence_.offsets[t] + first_, rows, turn);
      turn = 1 - turn;
    }
  }

 private:
  void step(int64_t row0, int64_t rows, int64_t turn) {
    const int64_t width = layer_.hh->n(), state = layer_.state, hidden = layer_.hidden;
    const float* const before = shared_.states[turn];
    float* const next = shared_.states[1 - turn];
    float* const after = sequence_.y.reals ? sequence_.y.reals + row0 * state : shared_.after;
    quantize(before, state, layer_.state_range, rows);
    multiply(rows, turn);
    const Channels channels{width, layer_.hh->row_sums(), layer_.scale_hh, layer_.bias_hh};
    for (int64_t b = 0; b < rows; ++b)
      layer_.kind->step(sequence_.input + (row0 + b) * width, shared_.sums + b * width, ranges_[b], channels, hidden,
                        {units_.begin, units_.end}, before + b * state,
                        sequence_.c ? sequence_.c + (first_ + b) * hidden : nullptr,
                        layer_.projection ? shared_.unprojected + b * hidden : after + b * state);
    if (layer_.projection) project(rows, after);
    for (int64_t b = 0; b < rows; ++b) leave(after + b * state, b, next, row0 + b);
    member_.wait();
  }

  // Every member all columns: they are few beside the products.
  void quantize(const float* reals, int64_t columns, const RowRange* range, int64_t rows) {
    for (int64_t b = 0; b < rows; ++b, reals += columns) {
      ranges_[b] = range ? *range : range_of(reals, nullptr, columns, 255);
      row_kernels().quantize(reals, nullptr, columns, ranges_[b], 255, q_ + b * ld_, nullptr);
    }
  }

  void multiply(int64_t rows, int64_t turn) {
    // Forwards and backwards in turn. A weight that is larger than the L2 cache is evicted in the order that it was read
    // in: a step that began where the last one did would find none of it.
    const auto product = turn ? &PackedGemm::run_backwards : &PackedGemm::run;
    const int thread = static_cast<int>(member_.thread), threads = static_cast<int>(member_.threads);
    if (!whole_gates_) {
      (layer_.hh->*product)(q_, ld_, rows, shared_.sums, layer_.hh->n(), thread, threads);
      return member_.wait();
    }
    const int gates = static_cast<int>(layer_.kind->gates);
    for (int i = 0; i < gates; ++i) {
      const int gate = turn ? gates - 1 - i : i;
      (layer_.hh->*product)(q_, ld_, rows, shared_.sums, layer_.hh->n(), gate * threads + thread, gates * threads);
    }
  }

  void project(int64_t rows, float* after) {
    const Linear& projection = *layer_.projection;
    member_.wait();
    quantize(shared_.unprojected, layer_.hidden, layer_.projection_range, rows);
    projection.gemm->run(q_, ld_, rows, shared_.projection_sums, layer_.state, static_cast<int>(member_.thread),
                         static_cast<int>(member_.threads));
    member_.wait();
    const Channels channels{states_.size(), projection.gemm->row_sums() + states_.begin, projection.scale + states_.begin,
                            nullptr};
    for (int64_t b = 0; b < rows; ++b)
      row_kernels().dequantize_sums(shared_.projection_sums + b * layer_.state + states_.begin, nullptr, ranges_[b], channels,
                                    false, after + b * layer_.state + states_.begin);
  }

  // This member's states of row b, which is `row` of the output.
  void leave(const float* after, int64_t b, float* next, int64_t row) {
    const int64_t state = layer_.state, begin = states_.begin, size = states_.size();
    float* const last = sequence_.h + (first_ + b) * state;
    if (next + b * state != last) std::copy_n(after + begin, size, next + b * state + begin);
    std::copy_n(after + begin, size, last + begin);
    if (sequence_.y.quantized)
      row_kernels().quantize(after + begin, nullptr, size, *layer_.state_range, 255,
                             sequence_.y.quantized + row * state + begin, nullptr);
  }

  const RnnLayer& layer_;
  const Sequence& sequence_;
  const int64_t first_, most_;
  const Shared& shared_;
  const Member& member_;
  const bool whole_gates_;
  Part units_, states_;
  int64_t ld_;
  uint8_t* q_;
  RowRange* ranges_;
};

// Rows [first, last), of which nothing is shared with other rows, by up to `threads` threads.
void run_rows(const RnnLayer& layer, const Sequence& sequence, int64_t first, int64_t last, int64_t threads) {
  Workspace& space = workspace();
  const int64_t rows = last - first, states = rows * layer.state;
  float* const unprojected = space.hidden.get(rows * layer.hidden + (threads > 1 ? 3 : 1) * states);
  float* const after = unprojected + rows * layer.hidden;
  float* const initial = sequence.h + first * layer.state;
  RowsOfMember::Shared shared{{initial, initial}, after, unprojected, space.sums.get(rows * layer.hh->n()),
                              layer.projection ? workspace(1).sums.get(states) : nullptr};
  if (threads > 1)
    for (int turn = 0; turn < 2; ++turn) {
      shared.states[turn] = after + (1 + turn) * states;
      std::copy_n(initial, states, shared.states[turn]);
    }
  each_member(threads, [&](const Member& member) { RowsOfMember(layer, sequence, first, last, shared, member).run(); });
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
  const Sequence sequence{input, sizes, offsets.data(), steps, h, c, y};
  const int64_t products = batch * layer.hh->n() * layer.hh->k(), threads = threads_for(products);
  // Threads that have rows of their own need not wait for each other.
  if (threads == 1 || batch < 4 * threads) return run_rows(layer, sequence, 0, batch, threads);
  each_thread(threads, [&](int64_t thread) {
    run_rows(layer, sequence, batch * thread / threads, batch * (thread + 1) / threads, 1);
  });
}

}  // namespace octet

#include "core/rnn/rnn.h"

#include <algorithm>
#include <vector>

#include "core/cpu/team.h"
#include "core/gemm/narrow_gemm.h"
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
    float *reals, *projection_reals;  // in their place, of a weight with scales by group
    const GroupedGemm *groups, *projection_groups;
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
    for (int64_t b = 0; b < rows; ++b) {
      const Products products = products_of(*layer_.hh, layer_.scale_hh, layer_.bias_hh, shared_.sums, shared_.reals, b, {0, width});
      layer_.kind->step(sequence_.input + (row0 + b) * width, products.sums, products.range, products.channels, hidden,
                        {units_.begin, units_.end}, before + b * state,
                        sequence_.c ? sequence_.c + (first_ + b) * hidden : nullptr,
                        layer_.projection ? shared_.unprojected + b * hidden : after + b * state);
    }
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
    const int thread = static_cast<int>(member_.thread), threads = static_cast<int>(member_.threads);
    if (!whole_gates_) {
      multiply_part(rows, turn, thread, threads);
      return member_.wait();
    }
    const int gates = static_cast<int>(layer_.kind->gates);
    for (int i = 0; i < gates; ++i) {
      const int gate = turn ? gates - 1 - i : i;
      multiply_part(rows, turn, gate * threads + thread, gates * threads);
    }
  }

  void multiply_part(int64_t rows, int64_t turn, int part, int parts) {
    // Forwards and backwards in turn. A weight that is larger than the L2 cache is evicted in the order that it was read
    // in: a step that began where the last one did would find none of it.
    const int64_t width = layer_.hh->n();
    if (shared_.groups)
      return shared_.groups->run_reals(q_, ld_, rows, zero_points(rows), shared_.reals, width, part, parts, turn);
    const auto product = turn ? &PackedGemm::run_backwards : &PackedGemm::run;
    (layer_.hh->*product)(q_, ld_, rows, shared_.sums, width, part, parts);
  }

  const int32_t* zero_points(int64_t rows) {
    int32_t* const out = zero_points_.get(rows);
    for (int64_t b = 0; b < rows; ++b) out[b] = ranges_[b].zero_point;
    return out;
  }

  // The products of row b, [part.begin, part.end) of its outputs, for what brings sums to reals.
  struct Products {
    const int32_t* sums;
    RowRange range;
    Channels channels;
  };
  Products products_of(const PackedGemm& gemm, const float* scale, const float* bias, const int32_t* sums, const float* reals,
                       int64_t b, Part part) {
    const int64_t n = gemm.n(), begin = part.begin;
    if (reals)
      return {as_sums_.sums(part.size()), {ranges_[b].scale, 0}, as_sums_.channels(part.size(), reals + b * n + begin, bias)};
    return {sums + b * n + begin, ranges_[b], {part.size(), gemm.row_sums() + begin, scale + begin, bias}};
  }

  void project(int64_t rows, float* after) {
    const Linear& projection = *layer_.projection;
    member_.wait();
    quantize(shared_.unprojected, layer_.hidden, layer_.projection_range, rows);
    const int thread = static_cast<int>(member_.thread), threads = static_cast<int>(member_.threads);
    if (!shared_.projection_groups)
      projection.gemm->run(q_, ld_, rows, shared_.projection_sums, layer_.state, thread, threads);
    else
      shared_.projection_groups->run_reals(q_, ld_, rows, zero_points(rows), shared_.projection_reals, layer_.state, thread, threads, false);
    member_.wait();
    for (int64_t b = 0; b < rows; ++b) {
      const Products products = products_of(*projection.gemm, projection.scale, nullptr, shared_.projection_sums,
                                            shared_.projection_reals, b, states_);
      row_kernels().dequantize_sums(products.sums, nullptr, products.range, products.channels, false,
                                    after + b * layer_.state + states_.begin);
    }
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
  RealsAsSums as_sums_;
  Scratch<int32_t> zero_points_;
};

// Rows [first, last), of which nothing is shared with other rows, by up to `threads` threads.
void run_rows(const RnnLayer& layer, const Sequence& sequence, int64_t first, int64_t last, int64_t threads) {
  Workspace& space = workspace();
  const int64_t rows = last - first, states = rows * layer.state, products = rows * layer.hh->n();
  const GroupedGemm* const groups = groups_of(*layer.hh, layer.scale_hh);
  const GroupedGemm* const projection_groups = layer.projection ? groups_of(*layer.projection->gemm, layer.projection->scale) : nullptr;
  float* const unprojected = space.hidden.get(rows * layer.hidden + (threads > 1 ? 3 : 1) * states);
  float* const after = unprojected + rows * layer.hidden;
  float* const initial = sequence.h + first * layer.state;
  Scratch<float> projected;
  RowsOfMember::Shared shared{{initial, initial},
                              after,
                              unprojected,
                              groups ? nullptr : space.sums.get(products),
                              layer.projection && !projection_groups ? workspace(1).sums.get(states) : nullptr,
                              groups ? workspace(1).hidden.get(products) : nullptr,
                              projection_groups ? projected.get(states) : nullptr,
                              groups,
                              projection_groups};
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

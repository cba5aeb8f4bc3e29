#include "core/plan/builder.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "core/cpu/transpose.h"
#include "core/gemm/workspace.h"
#include "core/plan/lower.h"

namespace octet {
PlanBuilder::PlanBuilder(const PreparedProgram& prepared, WeightPacker& weights, Plan* plan)
    : program_(prepared.program()),
      constants_(prepared.constants()),
      weights_(weights),
      plan_(plan),
      views_(program_.values()),
      pads_(program_.values()),
      sums_(program_.values(), nullptr) {}

void PlanBuilder::build(const std::vector<PlanTensor>& inputs) {
  if (static_cast<int>(inputs.size()) != program_.inputs)
    throw std::invalid_argument("the plan has " + std::to_string(program_.inputs) + " inputs, got " +
                                std::to_string(inputs.size()));
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_extent(inputs[i].sizes, "input " + std::to_string(i));
    plan_->buffers_.push_back({0, Plan::Home::kInput, static_cast<int64_t>(i)});
    views_[i] = PlanView{static_cast<int>(i), 0, inputs[i].real, inputs[i].sizes, inputs[i].strides, inputs[i].index};
  }
  for (const Operation& operation : program_.operations) {
    operation_ = operation.out - program_.inputs;
    if (views_[operation.out]) continue;  // another operation's step computes it too
    if (std::optional<PlanPad> pad = pad_of(*this, operation))
      pads_[operation.out] = std::move(pad);
    else
      views_[operation.out] = lower(*this, operation);
  }
  for (size_t i = 0; i < program_.outputs.size(); ++i) {
    operation_ = program_.outputs[i] - program_.inputs;
    give_out(i, program_.outputs[i]);
  }
  place_buffers();
}

PlanView PlanBuilder::fresh(const Sizes& sizes, const Sizes& strides, bool real) {
  return fresh_like({-1, 0, real, sizes, strides}, strides);
}

PlanView PlanBuilder::fresh_like(const PlanView& like, const Sizes& strides) {
  PlanView made = like;
  made.strides = strides, made.offset = 0, made.buffer = static_cast<int>(plan_->buffers_.size());
  plan_->buffers_.push_back({made.count() * made.element_bytes(), Plan::Home::kArena, 0});
  return made;
}

PlanView PlanBuilder::held(std::shared_ptr<const std::vector<float>> values, const Sizes& sizes) {
  plan_->buffers_.push_back({product(sizes) * 4, Plan::Home::kConstant, static_cast<int64_t>(plan_->constants_.size())});
  plan_->constants_.push_back(std::move(values));
  return {static_cast<int>(plan_->buffers_.size()) - 1, 0, true, sizes, plain_strides(sizes)};
}

PlanView PlanBuilder::with_strides(const PlanView& view, const Sizes& strides) {
  if (view.has_strides(strides)) {
    PlanView same = view;
    same.strides = strides;
    return same;
  }
  const PlanView made = fresh_like(view, strides);
  copy(view, made);
  return made;
}

PlanView PlanBuilder::dense(const PlanView& view) {
  std::vector<size_t> order;
  for (size_t d = 0; d < view.sizes.size(); ++d)
    if (view.sizes[d] != 1) order.push_back(d);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return view.strides[a] < view.strides[b]; });
  int64_t step = 1;
  for (const size_t d : order) {
    if (view.strides[d] != step) return channels_last(view);
    step *= view.sizes[d];
  }
  return view;
}

void PlanBuilder::emit(const std::vector<const PlanView*>& reads, const PlanView& write,
                       std::function<void(const PlanFrame&)> run, int over) {
  PlanStep step{std::move(run), {}, write.buffer, over, operation_};
  for (const PlanView* view : reads) step.reads.push_back(view->buffer);
  plan_->steps_.push_back(std::move(step));
}

namespace {

template <class T>
void copy_rows(const PlanLoops& loops, const T* from, T* to) {
  const int64_t n = loops.length(), to_step = loops.step(0), from_step = loops.step(1);
  each_part(loops.rows(), loops.rows() * n, [&](int64_t first, int64_t rows) {
    loops.each(first, rows, [&](const int64_t* at) {
      T* out = to + at[0];
      const T* in = from + at[1];
      if (to_step == 1 && from_step == 1)
        std::copy_n(in, n, out);
      else
        for (int64_t i = 0; i < n; ++i) out[i * to_step] = in[i * from_step];
    });
  });
}

}  // namespace

namespace {

// A copy between views whose innermost dimensions differ, in squares: the loop over the other dimensions, and the two.
template <class T>
void copy_turned(const PlanLoops& outer, const PlanTurn& turn, const T* from, T* to) {
  const int64_t tiles = (turn.columns + kTilePixels - 1) / kTilePixels, rows = outer.rows() * outer.length();
  each_part(rows * tiles, rows * turn.rows * turn.columns, [&](int64_t first, int64_t count) {
    for (int64_t tile = first; tile < first + count; ++tile) {
      const int64_t begin = tile % tiles * kTilePixels, n = std::min(kTilePixels, turn.columns - begin);
      const T* in = from + begin * turn.from_step;
      T* out = to + begin;
      outer.each(tile / tiles / outer.length(), 1, [&](const int64_t* at) {
        const int64_t place = tile / tiles % outer.length();
        in += at[1] + place * outer.step(1), out += at[0] + place * outer.step(0);
      });
      for (int64_t r = 0; r < turn.rows; r += kTileChannels)
        transpose(in + r, turn.from_step, n, std::min(kTileChannels, turn.rows - r), out + r * turn.to_step, turn.to_step);
    }
  });
}

}  // namespace

void PlanBuilder::copy(const PlanView& from, const PlanView& to) {
  const PlanLoops loops(from.sizes, {to.strides, from.strides});
  if (const std::optional<PlanTurn> turn = loops.turned(); turn && !to.index) {
    const PlanLoops outer(turn->sizes, turn->strides);
    emit({&from}, to, [=, turn = *turn](const PlanFrame& frame) {
      if (to.real)
        copy_turned(outer, turn, from.reals(frame), to.reals_out(frame));
      else
        copy_turned(outer, turn, from.bytes(frame), to.bytes_out(frame));
    });
    return;
  }
  emit({&from}, to, [=](const PlanFrame& frame) {
    if (to.real)
      copy_rows(loops, from.reals(frame), to.reals_out(frame));
    else if (to.index)
      copy_rows(loops, from.indices(frame), to.indices_out(frame));
    else
      copy_rows(loops, from.bytes(frame), to.bytes_out(frame));
  });
}

const PlanView* PlanBuilder::find(Value value) {
  if (views_[value]) return &*views_[value];
  const PlanPad* waiting = pad(value);
  return waiting ? &views_[value].emplace(padded(*this, *waiting)) : nullptr;
}

const PlanView& PlanBuilder::input(Value value) {
  const PlanView* found = find(value);
  if (!found) throw std::logic_error("a value is read before it is lowered");  // parse_program checked the order
  return *found;
}

const PlanView* PlanBuilder::known(Value value) const {
  if (views_[value]) return &*views_[value];
  const Operation* writer = program_.writer(value);
  const op::Same* same = writer ? writer->as<op::Same>() : nullptr;
  return same ? known(same->x) : nullptr;
}

const std::vector<PlanView>* PlanBuilder::states(Value value) const {
  const auto found = states_.find(value);
  return found == states_.end() ? nullptr : &found->second;
}

const PreparedConstant& PlanBuilder::constant(const Operation& operation, Constant index, const char* name,
                                              const char* dtype, size_t rank) const {
  if (index < 0 || index >= static_cast<int64_t>(constants_.size()))
    operation.fail("there are " + std::to_string(constants_.size()) + " constants");
  const PreparedConstant& found = constants_[index];
  if (found.dtype != dtype) operation.fail(std::string(name) + " is " + found.dtype + ", expected " + dtype);
  if (rank && found.sizes.size() != rank)
    operation.fail(std::string(name) + " has " + std::to_string(found.sizes.size()) + " dimensions, expected " +
                   std::to_string(rank));
  return found;
}

const PreparedConstant* PlanBuilder::vector(const Operation& operation, Constant index, const char* name,
                                            const char* dtype, int64_t count) const {
  if (index == kNoConstant) return nullptr;
  const PreparedConstant& found = constant(operation, index, name, dtype, 1);
  if (found.sizes[0] != count)
    operation.fail(std::string(name) + " has " + std::to_string(found.sizes[0]) + " values, expected " +
                   std::to_string(count));
  return &found;
}

std::shared_ptr<const std::vector<float>> PlanBuilder::reals(const Operation& operation, Constant index, const char* name,
                                                             int64_t count) const {
  const PreparedConstant* found = vector(operation, index, name, "float32", count);
  return found ? found->reals : nullptr;
}

std::shared_ptr<const std::vector<int32_t>> PlanBuilder::integers(const Operation& operation, Constant index,
                                                                  const char* name, int64_t count) const {
  const PreparedConstant* found = vector(operation, index, name, "int32", count);
  return found ? found->integers : nullptr;
}

void PlanBuilder::give_out(size_t place, Value value) {
  PlanView view = input(value);
  if (view.index) throw std::invalid_argument("the plan gives out int64, expected float32 or uint8");
  // Integers stay channels last for the next reader; floats keep the memory order of the user's own operations.
  const Sizes strides = view.real || view.rank() < 4 ? plain_strides(view.sizes) : channels_last_strides(view.sizes);
  const bool whole = view.offset == 0 && view.has_strides(strides) &&
                     plan_->buffers_[view.buffer].home == Plan::Home::kArena &&
                     plan_->buffers_[view.buffer].bytes == view.count() * (view.real ? 4 : 1);
  if (!whole) {
    const PlanView made = fresh(view.sizes, strides, view.real);
    copy(view, made);
    view = made;
  }
  plan_->buffers_[view.buffer].home = Plan::Home::kOutput;
  plan_->buffers_[view.buffer].place = static_cast<int64_t>(place);
  plan_->outputs_.push_back({view.sizes, strides, view.real});
}

// Buffers whose lifetimes do not overlap share memory: the largest first, each at the lowest place free for its lifetime.
void PlanBuilder::place_buffers() {
  const size_t count = plan_->buffers_.size();
  const int64_t steps = static_cast<int64_t>(plan_->steps_.size());
  std::vector<int64_t> first(count, steps), last(count, -1);
  for (int64_t s = 0; s < steps; ++s) {
    const auto touch = [&](int b) {
      first[b] = std::min(first[b], s);
      last[b] = std::max(last[b], s);
    };
    for (const int b : plan_->steps_[s].reads) touch(b);
    touch(plan_->steps_[s].write);
  }
  std::vector<size_t> order(count), home(count);
  std::iota(order.begin(), order.end(), 0);
  std::iota(home.begin(), home.end(), 0);
  for (int64_t s = 0; s < steps; ++s) {
    const int write = plan_->steps_[s].write, over = plan_->steps_[s].over;
    if (over < 0 || first[write] != s || last[home[over]] != s) continue;
    const Plan::Buffer &one = plan_->buffers_[over], &other = plan_->buffers_[write];
    if (one.home != Plan::Home::kArena || other.home != Plan::Home::kArena || one.bytes != other.bytes) continue;
    home[write] = home[over];
    last[home[over]] = last[write];
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return plan_->buffers_[a].bytes > plan_->buffers_[b].bytes; });
  struct Placed {
    int64_t begin, end, first, last;
  };
  std::vector<Placed> placed;  // by begin
  for (const size_t b : order) {
    Plan::Buffer& buffer = plan_->buffers_[b];
    if (buffer.home != Plan::Home::kArena || last[b] < 0 || home[b] != b) continue;
    // Kernels read slightly past the end of their input, so neighbouring buffers keep a distance.
    const int64_t bytes = (buffer.bytes + 63) / 64 * 64 + 2 * kSlack;
    int64_t begin = 0;
    for (const Placed& other : placed)
      if (other.first <= last[b] && first[b] <= other.last && begin + bytes > other.begin) begin = std::max(begin, other.end);
    buffer.place = begin + kSlack;
    const Placed own{begin, begin + bytes, first[b], last[b]};
    const auto earlier = [](const Placed& a, const Placed& b) { return a.begin < b.begin; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), own, earlier), own);
    plan_->arena_bytes_ = std::max(plan_->arena_bytes_, begin + bytes);
  }
  for (size_t b = 0; b < count; ++b)
    if (home[b] != b) plan_->buffers_[b].place = plan_->buffers_[home[b]].place;
}

}  // namespace octet

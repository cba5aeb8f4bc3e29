// Turns the operations of a program into steps over views, for inputs of given shapes: decides memory formats, and the
// place of each buffer.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/plan/pads.h"
#include "core/plan/plan.h"
#include "core/plan/prepared.h"
#include "core/plan/views.h"

namespace octet {

class PlanBuilder {
 public:
  PlanBuilder(const PreparedProgram& prepared, WeightPacker& weights, Plan* plan);
  void build(const std::vector<PlanTensor>& inputs);

  // A view of a new buffer of the arena.
  PlanView fresh(const Sizes& sizes, const Sizes& strides, bool real = false);
  // The same of what has the elements of `like`.
  PlanView fresh_like(const PlanView& like, const Sizes& strides);
  // A view of reals that the plan holds, one after the other.
  PlanView held(std::shared_ptr<const std::vector<float>> values, const Sizes& sizes);
  // The same values with these strides: the view itself where it has them, else a copy.
  PlanView with_strides(const PlanView& view, const Sizes& strides);
  PlanView plain(const PlanView& view) { return with_strides(view, plain_strides(view.sizes)); }
  PlanView channels_last(const PlanView& view) { return with_strides(view, channels_last_strides(view.sizes)); }
  // The view itself where its elements are without gaps in some order, else a copy with channels last.
  PlanView dense(const PlanView& view);
  void emit(const std::vector<const PlanView*>& reads, const PlanView& write, std::function<void(const PlanFrame&)> run,
            int over = -1);
  void copy(const PlanView& from, const PlanView& to);
  // Notes that a step holds `count` elements of so many bytes, where they grow with the sizes of a call.
  void hold_table(size_t count, size_t element_bytes) { plan_->table_bytes_ += static_cast<int64_t>(count * element_bytes); }
  // The view of a value that an operation reads; deferred padding is written now.
  const PlanView& input(Value value);
  // The view of a value that has one already, or null.
  const PlanView* known(Value value) const;
  // The deferred padding of a value, or null.
  const PlanPad* pad(Value value) const { return pads_[value] ? &*pads_[value] : nullptr; }
  // Steps that compute several operations at once, one ahead of being lowered.
  const Operation& operation(Place place) const { return program_.operations[place]; }
  const Operation* writer(Value value) const { return program_.writer(value); }
  // Defer a float sum to the only operation that reads it; and the deferred sum of a value, or null.
  void put_off(const Operation& sum) { sums_[sum.out] = &sum; }
  const Operation* put_off_sum(Value value) const { return sums_[value]; }
  void define(const Operation& operation, const PlanView& view) { views_[operation.out] = view; }  // and do not lower it
  // The final states of the recurrent layer that writes a value: h, and c where its kind has one.
  void keep_states(Value value, std::vector<PlanView> states) { states_[value] = std::move(states); }
  const std::vector<PlanView>* states(Value value) const;
  // A constant with the dtype and rank that its reader expects; rank 0 is any.
  const PreparedConstant& constant(const Operation& operation, Constant index, const char* name, const char* dtype,
                                   size_t rank = 0) const;
  // A constant that there is, or null.
  const PreparedConstant* find_constant(Constant index) const {
    return index >= 0 && index < static_cast<int64_t>(constants_.size()) ? &constants_[index] : nullptr;
  }
  // Whether a constant is uint8, as weights of few bits are.
  bool is_bytes(Constant index) const {
    const PreparedConstant* const found = find_constant(index);
    return found && found->dtype == "uint8";
  }
  WeightPacker& weights() const { return weights_; }
  // A vector of `count` values, or null where the operation has none.
  std::shared_ptr<const std::vector<float>> reals(const Operation& operation, Constant index, const char* name,
                                                  int64_t count) const;
  std::shared_ptr<const std::vector<int32_t>> integers(const Operation& operation, Constant index, const char* name,
                                                       int64_t count) const;

 private:
  const PreparedConstant* vector(const Operation& operation, Constant index, const char* name, const char* dtype,
                                 int64_t count) const;
  const PlanView* find(Value value);
  void give_out(size_t place, Value value);
  void place_buffers();

  const Program& program_;
  const std::vector<PreparedConstant>& constants_;
  WeightPacker& weights_;
  Plan* plan_;
  int operation_ = -1;  // whose steps are emitted
  std::vector<std::optional<PlanView>> views_;  // by value
  std::vector<std::optional<PlanPad>> pads_;
  std::vector<const Operation*> sums_;
  std::map<Value, std::vector<PlanView>> states_;
};

}  // namespace octet

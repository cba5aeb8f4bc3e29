// Turns the lines of a text into steps over views: decides shapes, memory formats, and which buffer lives where.
#pragma once

#include <map>
#include <string_view>

#include "core/plan/pads.h"
#include "core/plan/plan.h"
#include "core/plan/views.h"

namespace octet {

class PlanBuilder {
 public:
  PlanBuilder(const std::vector<PlanConstant>& constants, Plan* plan) : constants_(constants), plan_(plan) {}
  void build(const PlanText& text, const std::vector<PlanTensor>& inputs);

  // A view of a new buffer of the arena.
  PlanView fresh(const Sizes& sizes, const Sizes& strides, bool real = false);
  // The same values with these strides: the view itself where it has them, else a copy.
  PlanView with_strides(const PlanView& view, const Sizes& strides);
  PlanView plain(const PlanView& view) { return with_strides(view, plain_strides(view.sizes)); }
  PlanView channels_last(const PlanView& view) { return with_strides(view, channels_last_strides(view.sizes)); }
  // As it is where its elements lie without gaps in some order, else channels last.
  PlanView dense(const PlanView& view);
  void emit(const std::vector<const PlanView*>& reads, const PlanView& write, std::function<void(const PlanFrame&)> run,
            int over = -1);
  void copy(const PlanView& from, const PlanView& to);
  // The view of a register; padding that was put off is written out now.
  const PlanView& at(const PlanLine& line, int64_t reg);
  const PlanView& input(const PlanLine& line, std::string_view name) { return at(line, line.reg(name)); }
  // The view of a register that has one already, if under another name, or null.
  const PlanView* known(int64_t reg) const;
  // The padding that was put off for a register, or null.
  const PlanPad* pad(int64_t reg) const;
  // Steps that compute several lines at once: who reads a register, one line ahead of being lowered.
  const PlanLine* only_reader(int64_t reg) const;                       // null where it has several, or is given out
  const PlanLine* reader(int64_t reg, std::string_view op) const;       // the first whose name begins so, or null
  bool given_out(int64_t reg) const;
  Sizes rounded_strides(const PlanLine& line, const Sizes& sizes) const;  // of its integers: as a linear reader has them
  void define(const PlanLine& line, const PlanView& view) { registers_[line.out] = view; }  // and do not lower it
  PlanView pending_sum(const PlanLine& line);                           // leave a sum to its only reader
  const PlanLine* sum_of(int64_t reg) const;                            // the line of such a sum, or null
  int64_t size_of(const PlanLine& line, std::string_view reg, int64_t dim);
  const PlanConstant& constant(const PlanLine& line, std::string_view name, const char* dtype, size_t rank = 0) const;
  template <class T>
  std::shared_ptr<std::vector<T>> values(const PlanLine& line, std::string_view name, const char* dtype, int64_t count) const;

 private:
  const PlanView* find(int64_t reg);
  void give_out(size_t place, int64_t reg);
  void place_buffers();

  const std::vector<PlanConstant>& constants_;
  Plan* plan_;
  std::map<int64_t, PlanView> registers_;
  const PlanText* text_ = nullptr;
  std::map<int64_t, const PlanLine*> pending_;
  std::map<int64_t, PlanPad> pads_;
};

template <class T>
std::shared_ptr<std::vector<T>> PlanBuilder::values(const PlanLine& line, std::string_view name, const char* dtype,
                                                    int64_t count) const {
  if (!line.has(name)) return nullptr;
  const PlanConstant& found = constant(line, name, dtype, 1);
  if (found.sizes[0] != count)
    line.fail(std::string(name) + " has " + std::to_string(found.sizes[0]) + " values, expected " + std::to_string(count));
  const T* data = static_cast<const T*>(found.data);
  return std::make_shared<std::vector<T>>(data, data + count);
}

}  // namespace octet

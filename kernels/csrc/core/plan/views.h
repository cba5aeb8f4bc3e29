// Strided views of a plan's buffers, and loops over several of the same shape at once.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/plan/plan.h"

namespace octet {

// A tensor of a plan: elements of a buffer. Moves (permute, slice, ...) only create another view.
struct PlanView {
  int buffer = -1;
  int64_t offset = 0;  // in elements
  bool real = false;
  Sizes sizes, strides;
  bool index = false;  // int64

  int64_t element_bytes() const { return real ? 4 : index ? 8 : 1; }
  int64_t rank() const { return static_cast<int64_t>(sizes.size()); }
  int64_t count() const;
  bool has_strides(const Sizes& wanted) const;  // where they matter: at sizes above 1
  const uint8_t* bytes(const PlanFrame& frame) const { return frame.buffers[buffer] + offset; }
  uint8_t* bytes_out(const PlanFrame& frame) const { return frame.buffers[buffer] + offset; }
  const float* reals(const PlanFrame& frame) const { return reinterpret_cast<const float*>(frame.buffers[buffer]) + offset; }
  const int64_t* indices(const PlanFrame& frame) const {
    return reinterpret_cast<const int64_t*>(frame.buffers[buffer]) + offset;
  }
  int64_t* indices_out(const PlanFrame& frame) const { return reinterpret_cast<int64_t*>(frame.buffers[buffer]) + offset; }
  float* reals_out(const PlanFrame& frame) const { return reinterpret_cast<float*>(frame.buffers[buffer]) + offset; }
};

int64_t product(const Sizes& sizes);
// Raises std::invalid_argument for a shape whose product or strides might leave int64: one without values may say any sizes.
void check_extent(const Sizes& sizes, const std::string& name);
Sizes plain_strides(const Sizes& sizes);
// Dimension 1 innermost; plain below three dimensions.
Sizes channels_last_strides(const Sizes& sizes);
// A view with other sizes over the same elements; false where that needs a copy.
bool reshaped(const PlanView& view, const Sizes& sizes, PlanView* out);

// Two dimensions of a copy that are each innermost on one side: `columns` where it is written, `rows` where it is read. The
// others with the strides of the two sides are what it is done for.
struct PlanTurn {
  int64_t rows, columns, to_step, from_step;
  Sizes sizes;
  std::vector<Sizes> strides;
};

// Rows that views of one shape have in common: dimensions sorted so that the first view's smallest stride is innermost,
// and merged where all views allow it.
class PlanLoops {
 public:
  PlanLoops(const Sizes& sizes, const std::vector<Sizes>& strides);
  int64_t rows() const { return rows_; }
  int64_t length() const { return length_; }                             // of a row
  int64_t step(int view) const { return row_steps_[view]; }              // between elements of a row
  // Of a copy, the written view being the first: its turn, where each side has an innermost dimension of its own.
  std::optional<PlanTurn> turned() const;
  // fn(offsets of the row's first element in every view), for rows [first, first + count).
  template <class Fn>
  void each(int64_t first, int64_t count, Fn fn) const {
    if (count == 0) return;  // a size may be 0, which nothing is divided by
    int64_t offsets[kMostViews], index[kMostDims];
    for (int v = 0; v < views_; ++v) offsets[v] = 0;
    for (int d = outer_ - 1; d >= 0; --d) {
      index[d] = first % sizes_[d];
      first /= sizes_[d];
      for (int v = 0; v < views_; ++v) offsets[v] += index[d] * strides_[d][v];
    }
    for (int64_t row = 0; row < count; ++row) {
      fn(offsets);
      for (int d = outer_ - 1; d >= 0; --d) {
        for (int v = 0; v < views_; ++v) offsets[v] += strides_[d][v];
        if (++index[d] < sizes_[d]) break;
        for (int v = 0; v < views_; ++v) offsets[v] -= sizes_[d] * strides_[d][v];
        index[d] = 0;
      }
    }
  }

  static constexpr int kMostViews = 3, kMostDims = 12;

 private:
  int views_, outer_ = 0;
  int64_t rows_ = 1, length_ = 1;
  int64_t sizes_[kMostDims], strides_[kMostDims][kMostViews], row_steps_[kMostViews];
};

}  // namespace octet

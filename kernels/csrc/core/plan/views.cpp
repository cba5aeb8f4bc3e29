#include "core/plan/views.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace octet {

int64_t product(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()); }

void check_extent(const Sizes& sizes, const std::string& name) {
  constexpr int64_t most = int64_t{1} << 40;
  int64_t extent = 1;
  for (const int64_t size : sizes) {
    const int64_t some = std::max<int64_t>(size, 1);
    if (some > most / extent)
      throw std::invalid_argument(name + " has a shape of more than 2**40 values, where a size of 0 counts as 1");
    extent *= some;
  }
}

int64_t PlanView::count() const { return product(sizes); }

bool PlanView::has_strides(const Sizes& wanted) const {
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] > 1 && strides[d] != wanted[d]) return false;
  return true;
}

Sizes plain_strides(const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0; step *= std::max<int64_t>(sizes[d], 1)) strides[d] = step;
  return strides;
}

Sizes channels_last_strides(const Sizes& sizes) {
  if (sizes.size() < 3) return plain_strides(sizes);
  Sizes moved(sizes);
  moved.erase(moved.begin() + 1);
  moved.push_back(sizes[1]);
  Sizes strides = plain_strides(moved);
  strides.insert(strides.begin() + 1, strides.back());
  strides.pop_back();
  return strides;
}

bool reshaped(const PlanView& view, const Sizes& sizes, PlanView* out) {
  *out = view;
  out->sizes = sizes;
  out->strides.assign(sizes.size(), 1);
  if (view.count() == 0) {
    out->strides = plain_strides(sizes);
    return true;
  }
  // Dimensions that lie side by side in memory are one block; the new dimensions must cut each block without a rest.
  struct Block {
    int64_t size, step;
  };
  std::vector<Block> blocks;
  for (int64_t d = 0; d < view.rank(); ++d) {
    if (view.sizes[d] == 1) continue;
    if (!blocks.empty() && blocks.back().step == view.sizes[d] * view.strides[d])
      blocks.back() = {blocks.back().size * view.sizes[d], view.strides[d]};
    else
      blocks.push_back({view.sizes[d], view.strides[d]});
  }
  int64_t left = 1, step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] == 1) continue;
    if (left == 1) {
      if (blocks.empty()) return false;
      left = blocks.back().size, step = blocks.back().step;
      blocks.pop_back();
    }
    if (left % sizes[d]) return false;
    out->strides[d] = step;
    left /= sizes[d], step *= sizes[d];
  }
  return left == 1 && blocks.empty();
}

std::optional<PlanTurn> PlanLoops::turned() const {
  if (row_steps_[0] != 1 || row_steps_[1] == 1 || rows_ == 0) return {};
  for (int inner = 0; inner < outer_; ++inner) {
    if (strides_[inner][1] != 1) continue;
    PlanTurn turn{sizes_[inner], length_, strides_[inner][0], row_steps_[1], {}, {{}, {}}};
    for (int d = 0; d < outer_; ++d)
      if (d != inner) {
        turn.sizes.push_back(sizes_[d]);
        for (const int side : {0, 1}) turn.strides[side].push_back(strides_[d][side]);
      }
    return turn;
  }
  return {};
}

PlanLoops::PlanLoops(const Sizes& sizes, const std::vector<Sizes>& strides) : views_(static_cast<int>(strides.size())) {
  std::vector<size_t> order;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1) order.push_back(d);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[0][a] > strides[0][b]; });
  std::fill(row_steps_, row_steps_ + kMostViews, 1);
  int dims = 0;
  for (const size_t d : order) {
    bool merged = dims > 0;
    for (int v = 0; merged && v < views_; ++v) merged = strides_[dims - 1][v] == strides[v][d] * sizes[d];
    if (dims == kMostDims) throw std::invalid_argument("a tensor has more than 12 dimensions");
    if (merged)
      sizes_[dims - 1] *= sizes[d];
    else
      sizes_[dims++] = sizes[d];
    for (int v = 0; v < views_; ++v) strides_[dims - 1][v] = strides[v][d];
  }
  if (dims) {
    outer_ = dims - 1;
    length_ = sizes_[outer_];
    std::copy_n(strides_[outer_], views_, row_steps_);
  }
  for (int d = 0; d < outer_; ++d) rows_ *= sizes_[d];
  if (length_ == 0) rows_ = 0;
}

}  // namespace octet

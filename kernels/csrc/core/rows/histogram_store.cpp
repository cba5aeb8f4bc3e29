#include "core/rows/histogram_store.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/rows/wrapping.h"

namespace octet {
namespace {

// Of a bin's width: the reciprocal of a smaller one overflows float32.
constexpr int kLeastExponent = -126;

// The smallest exponent >= kLeastExponent of a width by which all of [low, high] fits the grid.
int exponent_for(float low, float high, int64_t bins) {
  const float bound = std::max(-low, high);
  if (bound == 0.0f) return kLeastExponent;  // frexp gives 0 an exponent of 0
  int exponent, half_exponent;
  std::frexp(bound, &exponent);
  std::frexp(static_cast<double>(bins / 2), &half_exponent);
  return std::max(exponent - half_exponent + 1, kLeastExponent);
}

// The same counts on bins 2**doublings times as wide.
void widen(int64_t* counts, int64_t bins, int doublings) {
  const int64_t half = bins / 2, factor = int64_t{1} << std::min(doublings, 32);
  std::vector<int64_t> widened(bins, 0);
  for (int64_t s = -half; s < half; ++s) add_to(widened[s / factor + half], counts[s + half]);
  std::copy(widened.begin(), widened.end(), counts);
}

}  // namespace

Seen add_to_row(const HistogramRow& row, const CountValues& first, const CountValues& again) {
  const bool seen_before = *row.low <= *row.high;
  const int exponent = seen_before ? exponent_for(*row.low, *row.high, row.bins) : kLeastExponent;
  const auto grid = [](int exponent, int64_t bins) { return HistogramGrid(std::ldexp(1.0, exponent), bins); };
  const Seen seen = first(grid(exponent, row.bins), row.counts);
  if (seen.low > seen.high) return seen;  // nothing finite
  const int needed = exponent_for(seen.low, seen.high, row.bins);
  if (needed > exponent) {
    // Seldom: the first call, and one that holds values of a size not seen before. What was counted is taken back.
    if (seen_before) {
      std::vector<int64_t> counted(row.bins, 0);
      again(grid(exponent, row.bins), counted.data());
      for (int64_t bin = 0; bin < row.bins; ++bin) add_to(row.counts[bin], -counted[bin]);
      widen(row.counts, row.bins, needed - exponent);
    } else {
      std::fill_n(row.counts, row.bins, 0);
    }
    again(grid(needed, row.bins), row.counts);
  }
  *row.low = std::min(*row.low, seen.low);
  *row.high = std::max(*row.high, seen.high);
  return seen;
}

Seen add_to_row(const float* x, int64_t n, const HistogramRow& row) {
  const CountValues count = [=](const HistogramGrid& grid, int64_t* counts) { return histogram(x, n, grid, counts); };
  return add_to_row(row, count, count);
}

}  // namespace octet

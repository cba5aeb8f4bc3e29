// What an observer keeps of one row of values over many calls: extremes, and counts on a grid that widens where it has to.
#pragma once

#include <cstdint>
#include <functional>

#include "core/rows/histogram.h"

namespace octet {

struct HistogramRow {
  float* low;  // of all finite values so far; low > high where there were none
  float* high;
  int64_t* counts;  // (bins,), on the grid that `low` and `high` need
  int64_t bins;     // a power of two from 64 to 32768
};

// Goes over values and adds them to counts on a grid.
using CountValues = std::function<Seen(const HistogramGrid&, int64_t* counts)>;

// Adds the values that `first` goes over to the row; returns what was seen of them. Where they need a wider grid than the row
// had, `again` goes over the same values.
Seen add_to_row(const HistogramRow& row, const CountValues& first, const CountValues& again);

// Adds x (n,) to the row.
Seen add_to_row(const float* x, int64_t n, const HistogramRow& row);

}  // namespace octet

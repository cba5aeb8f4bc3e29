// What an observer keeps of one row of values over many calls: extremes, and counts on a grid that widens where it has to.
#pragma once

#include <cstdint>

#include "core/rows/histogram.h"

namespace octet {

struct HistogramRow {
  float* low;  // of all finite values so far; low > high where there were none
  float* high;
  int64_t* counts;  // (bins,), on the grid that `low` and `high` need
  int64_t bins;     // a power of two from 64 to 32768
};

// Adds x (n,) to the row; returns what was seen of x.
Seen add_to_row(const float* x, int64_t n, const HistogramRow& row);

}  // namespace octet

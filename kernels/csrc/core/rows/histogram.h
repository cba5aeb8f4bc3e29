// A tensor's extremes, number of non-finite values, and histogram on a given grid, in one pass for an observer.
#pragma once

#include <cstdint>
#include <limits>

namespace octet {

struct Seen {
  float low = std::numeric_limits<float>::infinity(), high = -std::numeric_limits<float>::infinity();
  int64_t nan = 0, inf = 0;

  void add(const Seen& other);
};

// Bins of equal width, the middle of which is 0.
struct HistogramGrid {
  double width;  // a power of two from 2**-126 to 2**126
  int64_t bins;  // even, from 2 to 32768

  // Raises std::invalid_argument where they are not that.
  HistogramGrid(double width, int64_t bins);
};

// Adds to counts (bins,) how many of x (n,) lie in each bin; those beyond the ends count at the ends.
Seen histogram(const float* x, int64_t n, const HistogramGrid& grid, int64_t* counts);

}  // namespace octet

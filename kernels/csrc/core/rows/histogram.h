// A tensor's extremes, number of non-finite values, and histogram on a given grid, in one pass for an observer.
#pragma once

#include <cstdint>
#include <limits>
#include <mutex>
#include <vector>

#include "core/rows/rows.h"

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

// Counts of one thread, brought to the counts of all in between and at the end.
class BinCounter {
 public:
  // Values that are looked at together: they and their indices stay in the L1 cache.
  static constexpr int64_t kBlock = 2048;

  // counts: (grid.bins,), added to under `merging`.
  BinCounter(const HistogramGrid& grid, int64_t* counts, std::mutex& merging);
  ~BinCounter();
  BinCounter(const BinCounter&) = delete;
  BinCounter& operator=(const BinCounter&) = delete;

  // Counts x (n,), n <= kBlock; those beyond the ends of the grid count at the ends. False where some are not finite.
  bool add(const float* x, int64_t n, Seen& seen);
  // The same where somebody knows the extremes of x and whether all are finite.
  void add(const float* x, int64_t n, Seen extremes, bool finite, Seen& seen);

 private:
  int64_t keep_finite(const float* x, int64_t n, Seen& block);
  void count(int64_t n);
  void flush();

  const float inverse_;
  const int64_t bins_;
  int64_t* const all_;
  std::mutex& merging_;
  std::vector<uint16_t> apart_;  // all 0 before the first block, and after each flush
  int64_t blocks_ = 0, in_the_middle_ = 0;
  uint16_t index_[kBlock + kIndexRoom];
  float finite_[kBlock];
};

// Values of a tensor for which a second thread is worth its start.
constexpr int64_t kObservedPerThread = 1 << 16;

// Adds to counts (bins,) how many of x (n,) lie in each bin.
Seen histogram(const float* x, int64_t n, const HistogramGrid& grid, int64_t* counts);

}  // namespace octet

#include "core/rows/histogram.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/cpu/threads.h"
#include "core/rows/rows.h"

namespace octet {
namespace {

// Values whose indices are computed together: both stay in the L1 cache.
constexpr int64_t kBlock = 2048;
// Bin 0, where the zeros of a ReLU are, is not counted but gets what is left. Neighbours often fall into another bin together
// (a padded border, an upper clamp), and an increment waits for the one before it in the same place: so they are counted apart. The counts of a bin lie side by side: a power of two apart, the loads of one would
// wait for stores to the others, of which the CPU compares 12 bits (with two hot bins, 2.0 ns a value against 0.3).
constexpr int kApart = 4;
// Blocks after which the 16-bit counts are emptied. One of the kApart takes what a block has left over as well.
constexpr int64_t kBlocksPerFlush = 65535 / (kBlock / kApart + kApart);
constexpr int64_t kValuesPerThread = 1 << 16;

// Counts of one thread, brought to the `counts` of all in between and at the end.
class Histogram {
 public:
  Histogram(float inverse, int64_t bins, int64_t* counts, std::mutex& merging)
      : inverse_(inverse), bins_(bins), all_(counts), merging_(merging), apart_(kApart * bins, 0) {}

  Seen add(const float* x, int64_t n) {
    Seen seen;
    for (int64_t blocks = 1; n > 0; x += kBlock, n -= kBlock, ++blocks) {
      add_block(x, std::min(n, kBlock), seen);
      if (blocks % kBlocksPerFlush == 0) flush();
    }
    flush();
    return seen;
  }

 private:
  void add_block(const float* x, int64_t n, Seen& seen) {
    Seen block;
    if (!row_kernels().extremes(x, n, &block.low, &block.high)) {
      block = Seen{};
      n = keep_finite(x, n, block);
      x = finite_;
      if (n) row_kernels().extremes(x, n, &block.low, &block.high);
    }
    seen.add(block);
    const int64_t outside = row_kernels().bin_indices(x, n, inverse_, static_cast<int32_t>(bins_ / 2), index_);
    count(outside);
    in_the_middle_ += n - outside;
  }

  int64_t keep_finite(const float* x, int64_t n, Seen& block) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (std::isfinite(x[i]))
        finite_[kept++] = x[i];
      else
        ++(std::isnan(x[i]) ? block.nan : block.inf);
    }
    return kept;
  }

  void count(int64_t n) {
    uint16_t* const counts = apart_.data();
    int64_t i = 0;
    for (; i + kApart <= n; i += kApart)
#pragma GCC unroll 4
      for (int part = 0; part < kApart; ++part) ++counts[kApart * index_[i + part] + part];
    for (; i < n; ++i) ++counts[kApart * index_[i]];
  }

  void flush() {
    const std::lock_guard lock(merging_);
    for (int64_t bin = 0; bin < bins_; ++bin) {
      uint32_t sum = 0;
      for (int part = 0; part < kApart; ++part) sum += apart_[kApart * bin + part];
      all_[bin] += sum;
    }
    all_[bins_ / 2] += in_the_middle_;
    in_the_middle_ = 0;
    std::fill(apart_.begin(), apart_.end(), 0);
  }

  const float inverse_;
  const int64_t bins_;
  int64_t* const all_;
  std::mutex& merging_;
  std::vector<uint16_t> apart_;
  int64_t in_the_middle_ = 0;
  uint16_t index_[kBlock + kIndexRoom];
  float finite_[kBlock];
};

}  // namespace

void Seen::add(const Seen& other) {
  low = std::min(low, other.low);
  high = std::max(high, other.high);
  nan += other.nan;
  inf += other.inf;
}

HistogramGrid::HistogramGrid(double width, int64_t bins) : width(width), bins(bins) {
  if (bins < 2 || bins > 32768 || bins % 2)
    throw std::invalid_argument("bins is " + std::to_string(bins) + ", expected an even number from 2 to 32768");
  int exponent;
  if (std::frexp(width, &exponent) == 0.5 && exponent >= -125 && exponent <= 127) return;
  std::ostringstream got;
  got << width;
  throw std::invalid_argument("width is " + got.str() + ", expected a power of two from 2**-126 to 2**126");
}

Seen histogram(const float* x, int64_t n, const HistogramGrid& grid, int64_t* counts) {
  const float inverse = static_cast<float>(1.0 / grid.width);
  Seen seen;
  std::mutex merging;
  each_range(n, kValuesPerThread, [&](int64_t begin, int64_t end) {
    const Seen part = Histogram(inverse, grid.bins, counts, merging).add(x + begin, end - begin);
    const std::lock_guard lock(merging);
    seen.add(part);
  });
  return seen;
}

}  // namespace octet

#include "core/cpu/of_thread.h"
#include "core/rows/histogram.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/cpu/threads.h"
#include "core/rows/wrapping.h"

namespace octet {
namespace {

// Bin 0, where the zeros of a ReLU are, is not counted but gets what is left. Neighbours often fall into another bin together
// (a padded border, an upper clamp), and an increment waits for the one before it in the same place: so they are counted apart. The counts of a bin lie side by side: a power of two apart, the loads of one would
// wait for stores to the others, of which the CPU compares 12 bits (with two hot bins, 2.0 ns a value against 0.3).
constexpr int kApart = 4;  // 16-bit indices in a 64-bit load
// Blocks after which the 16-bit counts are emptied. One of the kApart takes what a block has left over as well.
constexpr int64_t kBlocksPerFlush = 65535 / (BinCounter::kBlock / kApart + kApart);

// Zeros that the last counter of this thread has left: to get and clear them anew takes as long as 10,000 values.
std::vector<uint16_t>& kept_of_thread() {
  thread_local std::vector<uint16_t>* own = nullptr;
  return of_thread(own);
}

}  // namespace

BinCounter::BinCounter(const HistogramGrid& grid, int64_t* counts, std::mutex& merging)
    : inverse_(static_cast<float>(1.0 / grid.width)),
      bins_(grid.bins),
      all_(counts),
      merging_(merging),
      apart_(std::move(kept_of_thread())) {
  apart_.resize(std::max<size_t>(apart_.size(), kApart * grid.bins), 0);
}

BinCounter::~BinCounter() {
  flush();
  kept_of_thread() = std::move(apart_);
}

bool BinCounter::add(const float* x, int64_t n, Seen& seen) {
  Seen block;
  const bool finite = row_kernels().extremes(x, 1, n, &block.low, &block.high, nullptr);
  add(x, n, block, finite, seen);
  return finite;
}

void BinCounter::add(const float* x, int64_t n, Seen block, bool finite, Seen& seen) {
  if (!finite) {
    block = Seen{};
    n = keep_finite(x, n, block);
    x = finite_;
    row_kernels().extremes(x, 1, n, &block.low, &block.high, nullptr);
  }
  seen.add(block);
  const int64_t outside = row_kernels().bin_indices(x, n, inverse_, static_cast<int32_t>(bins_ / 2), index_);
  count(outside);
  in_the_middle_ += n - outside;
  if (++blocks_ % kBlocksPerFlush == 0) flush();
}

int64_t BinCounter::keep_finite(const float* x, int64_t n, Seen& block) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isfinite(x[i]))
      finite_[kept++] = x[i];
    else
      ++(std::isnan(x[i]) ? block.nan : block.inf);
  }
  return kept;
}

void BinCounter::count(int64_t n) {
  uint16_t* const counts = apart_.data();
  int64_t i = 0;
  for (; i + kApart <= n; i += kApart) {
    uint64_t four;  // one load for kApart indices: the loads and stores of the counts are what limits this loop
    std::memcpy(&four, index_ + i, sizeof four);
#pragma GCC unroll 4
    for (int part = 0; part < kApart; ++part) ++counts[kApart * (four >> 16 * part & 0xffff) + part];
  }
  for (; i < n; ++i) ++counts[kApart * index_[i]];
}

void BinCounter::flush() {
  const std::lock_guard lock(merging_);
  uint16_t* counts = apart_.data();
  for (int64_t bin = 0; bin < bins_; ++bin, counts += kApart) {
    uint64_t four;
    std::memcpy(&four, counts, sizeof four);
    if (four == 0) continue;  // most bins of most tensors
    int64_t sum = 0;
    for (int part = 0; part < kApart; ++part) sum += static_cast<int64_t>(four >> 16 * part & 0xffff);
    add_to(all_[bin], sum);
    four = 0;
    std::memcpy(counts, &four, sizeof four);
  }
  add_to(all_[bins_ / 2], in_the_middle_);
  in_the_middle_ = 0;
}

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
  Seen seen;
  std::mutex merging;
  each_range(n, kObservedPerThread, [&](int64_t begin, int64_t end) {
    Seen part;
    {
      BinCounter counter(grid, counts, merging);
      for (; begin < end; begin += BinCounter::kBlock) counter.add(x + begin, std::min(end - begin, BinCounter::kBlock), part);
    }
    const std::lock_guard lock(merging);
    seen.add(part);
  });
  return seen;
}

}  // namespace octet

// What an observer needs of a tensor in one pass: its extremes, what is not finite, and a histogram on a given grid.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <vector>

#include "rows.h"

namespace octet {
namespace {

using at::Tensor;

// Values whose indices are computed together: both stay in the L1 cache.
constexpr int64_t kBlock = 2048;
// Neighbours often fall into one bin (the zeros of a ReLU), and an increment waits for the one before it in the same
// place: so they are counted apart. The counts of a bin lie side by side: a power of two apart, the loads of one would
// wait for stores to the others, of which the CPU compares 12 bits (with two hot bins, 2.0 ns a value against 0.3).
constexpr int kApart = 4;
// Blocks after which the 16-bit counts are emptied. One of the kApart takes what a block has left over as well.
constexpr int64_t kBlocksPerFlush = 65535 / (kBlock / kApart + kApart);
constexpr int64_t kValuesPerThread = 1 << 16;

struct Seen {
  float low = std::numeric_limits<float>::infinity(), high = -std::numeric_limits<float>::infinity();
  int64_t nan = 0, inf = 0;

  void add(const Seen& other) {
    low = std::min(low, other.low);
    high = std::max(high, other.high);
    nan += other.nan;
    inf += other.inf;
  }
};

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
    const int32_t half = static_cast<int32_t>(bins_ / 2);
    Seen block;
    if (!row_kernels().bin_indices(x, n, inverse_, half, index_, &block.low, &block.high)) {
      block = Seen{};
      n = keep_finite(x, n, block);
      if (n) row_kernels().bin_indices(finite_, n, inverse_, half, index_, &block.low, &block.high);
    }
    seen.add(block);
    count(n);
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
    std::fill(apart_.begin(), apart_.end(), 0);
  }

  const float inverse_;
  const int64_t bins_;
  int64_t* const all_;
  std::mutex& merging_;
  std::vector<uint16_t> apart_;
  uint16_t index_[kBlock];
  float finite_[kBlock];
};

std::tuple<Tensor, Tensor, Tensor> histogram_op(const Tensor& x, double width, int64_t bins) {
  TORCH_CHECK_VALUE(x.dim() == 1, "x has shape ", x.sizes(), ", expected one dimension");
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, "x is ", x.scalar_type(), ", expected Float");
  TORCH_CHECK_VALUE(bins >= 2 && bins <= 32768 && bins % 2 == 0, "bins is ", bins,
                    ", expected an even number from 2 to 32768");
  int exponent;
  TORCH_CHECK_VALUE(std::frexp(width, &exponent) == 0.5 && exponent >= -125 && exponent <= 127, "width is ", width,
                    ", expected a power of two from 2**-126 to 2**126");
  const Tensor input = x.contiguous();
  const float* values = input.const_data_ptr<float>();
  const float inverse = static_cast<float>(1.0 / width);
  Tensor counts = at::zeros({bins}, x.options().dtype(at::kLong));
  int64_t* all = counts.mutable_data_ptr<int64_t>();
  Seen seen;
  std::mutex merging;
  at::parallel_for(0, input.numel(), kValuesPerThread, [&](int64_t begin, int64_t end) {
    const Seen part = Histogram(inverse, bins, all, merging).add(values + begin, end - begin);
    const std::lock_guard lock(merging);
    seen.add(part);
  });
  Tensor extremes = at::empty({2}, x.options()), non_finite = at::empty({2}, counts.options());
  extremes.mutable_data_ptr<float>()[0] = seen.low;
  extremes.mutable_data_ptr<float>()[1] = seen.high;
  non_finite.mutable_data_ptr<int64_t>()[0] = seen.nan;
  non_finite.mutable_data_ptr<int64_t>()[1] = seen.inf;
  return {extremes, non_finite, counts};
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) { m.impl("histogram", &histogram_op); }

}  // namespace octet

#include "core/cpu/threads.h"

#include <algorithm>

namespace octet {
namespace {

// Below this many products a second thread costs more than it brings.
constexpr int64_t kProductsPerThread = 1 << 18;

}  // namespace

int64_t threads_for(int64_t products) {
  const int64_t useful = products / kProductsPerThread;
  return useful <= 1 ? 1 : std::min(available_threads(), useful);
}

void each_range(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t)> fn) {
  if (n <= 0) return;
  const int64_t useful = (n + grain - 1) / grain, threads = useful <= 1 ? 1 : std::min(available_threads(), useful);
  each_thread(threads, [&](int64_t thread) {
    const int64_t begin = n * thread / threads, end = n * (thread + 1) / threads;
    if (begin < end) fn(begin, end);
  });
}

void each_part(int64_t m, int64_t products, FunctionRef<void(int64_t, int64_t)> fn, int64_t block) {
  const int64_t threads = std::min(m, threads_for(products));
  each_thread(threads, [&](int64_t thread) {
    const int64_t last = m * (thread + 1) / threads;
    for (int64_t first = m * thread / threads; first < last; first += block) fn(first, std::min(block, last - first));
  });
}

void each_block(int64_t m, int64_t products, FunctionRef<void(int64_t, int64_t, int64_t)> fn, int64_t block) {
  const int64_t threads = threads_for(products);
  if (m < 8 * threads) return fn(0, m, threads);
  each_part(m, products, [&](int64_t first, int64_t rows) { fn(first, rows, 1); }, block);
}

void each_share(int64_t m, int64_t products, int64_t block, bool wide,
                FunctionRef<void(int64_t, int64_t, int, int)> fn) {
  const int64_t threads = threads_for(products);
  const bool columns = wide || m < 8 * threads;
  each_thread(threads, [&](int64_t thread) {
    const int64_t end = columns ? m : m * (thread + 1) / threads;
    const int part = columns ? static_cast<int>(thread) : 0, parts = columns ? static_cast<int>(threads) : 1;
    for (int64_t first = columns ? 0 : m * thread / threads; first < end; first += block)
      fn(first, std::min(block, end - first), part, parts);
  });
}

}  // namespace octet

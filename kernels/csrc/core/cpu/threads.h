// Work shared among threads, over three functions that a program defines once: the extension by torch's threads
// (torch/torch_threads.cpp), everybody else by OpenMP's (threads_openmp.cpp). A seam of the linker: nothing is set at run time.
#pragma once

#include <cstdint>

namespace octet {

template <class Signature>
class FunctionRef;

// A function that its caller keeps. A std::function would copy what it captures to the heap, which a small layer notices.
template <class... Arguments>
class FunctionRef<void(Arguments...)> {
 public:
  template <class Fn>
  FunctionRef(const Fn& fn)
      : fn_(&fn), call_([](const void* fn, Arguments... arguments) { (*static_cast<const Fn*>(fn))(arguments...); }) {}
  void operator()(Arguments... arguments) const { call_(fn_, arguments...); }

 private:
  const void* fn_;
  void (*call_)(const void*, Arguments...);
};

// The seam. Threads that the caller may use, itself among them: 1 inside a parallel region.
int64_t available_threads();
// fn(thread) for thread in [0, threads), at the same time where threads exist; what one throws, the caller gets.
void run_threads(int64_t threads, FunctionRef<void(int64_t)> fn);
// fn(thread, members) for thread in [0, members) at the same time, so that they may wait for each other: as many as there are, and
// at most `most`. fn throws nothing. (team.h)
void run_team(int64_t most, FunctionRef<void(int64_t, int64_t)> fn);

// Threads worth starting for this many products; 1 inside a parallel region.
int64_t threads_for(int64_t products);

// run_threads, which no thread and one need not ask for.
inline void each_thread(int64_t threads, FunctionRef<void(int64_t)> fn) {
  if (threads < 1) return;
  if (threads == 1) return fn(0);
  run_threads(threads, fn);
}

// fn(begin, end) over parts of [0, n) that threads share, each at least `grain` long where there are two.
void each_range(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t)> fn);

// Rows that are quantised, multiplied and written back together: their sums stay in the cache.
constexpr int64_t kRowBlock = 64;

// fn(first, count) over blocks of [0, m) that threads share.
void each_part(int64_t m, int64_t products, FunctionRef<void(int64_t, int64_t)> fn, int64_t block = kRowBlock);

// fn(first row, rows, threads to use inside) over blocks of [0, m): many rows are shared among threads, few rows leave the
// threads to the product itself.
void each_block(int64_t m, int64_t products, FunctionRef<void(int64_t, int64_t, int64_t)> fn, int64_t block = kRowBlock);

// fn(first row, rows, part, parts) over blocks of the rows [0, m) of a product, `part` of `parts` of its outputs each: few rows
// are not shared among threads but the outputs are, and so they are where the weight is `wide`, so that each weight goes to
// one core.
void each_share(int64_t m, int64_t products, int64_t block, bool wide,
                FunctionRef<void(int64_t, int64_t, int, int)> fn);

}  // namespace octet

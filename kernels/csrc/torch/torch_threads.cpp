// The core's threads are torch's: the number that torch.set_num_threads chose, and none within a parallel region of torch.
#include <ATen/Parallel.h>
#if AT_PARALLEL_OPENMP
#include <omp.h>
#endif
#include <torch/library.h>

#include <algorithm>

#include "core/cpu/threads.h"

namespace octet {
namespace {

// Of the calling thread, whose pool is OpenMP's alone: GNU's gives each thread that begins a region one of its own. Regions of torch's
// own operators start it too, and are not noted.
thread_local bool has_pool = false;

// In a child of a fork only the thread that forked lives on, and would wait for ever for the others of its pool in the next region, of
// torch's operators as of ours. So they end before, and the next region starts new ones, in the parent and in the child.
void before_fork() {
#if AT_PARALLEL_OPENMP
  if (omp_pause_resource_all(omp_pause_soft) == 0) has_pool = false;
#endif
}

// Where they could not be ended: without a pool the thread makes a new one.
void after_fork() {
  if (has_pool) at::set_num_threads(1);
}

}  // namespace

int64_t available_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

void run_threads(int64_t threads, FunctionRef<void(int64_t)> fn) {
  has_pool = true;
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) fn(thread);
  });
}

// at::parallel_for may give one thread two parts, which then cannot wait for each other.
void run_team(int64_t most, FunctionRef<void(int64_t, int64_t)> fn) {
#if AT_PARALLEL_OPENMP
  has_pool = true;
  // All threads, as torch's own regions have: OpenMP would end those that one region leaves out, and start them anew for the next.
#pragma omp parallel
  {
    const int64_t thread = omp_get_thread_num(), members = std::min<int64_t>(most, omp_get_num_threads());
    if (thread < members) fn(thread, members);
  }
#else
  (void)most;
  fn(0, 1);
#endif
}

TORCH_LIBRARY_FRAGMENT(octet_native, m) {
  m.def("before_fork() -> ()", &before_fork);
  m.def("after_fork() -> ()", &after_fork);
}

}  // namespace octet

// The core's own threads: OpenMP's, or one where it is compiled without. A program that defines these three functions itself
// gets its own instead: the linker takes this file from the library only where they are missing.
#include "core/cpu/threads.h"

#include <exception>
#include <mutex>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace octet {

#if defined(_OPENMP)
int64_t available_threads() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }
#else
int64_t available_threads() { return 1; }
#endif

void run_threads(int64_t threads, FunctionRef<void(int64_t)> fn) {
  std::exception_ptr first;
  std::mutex noting;
#if defined(_OPENMP)
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(static, 1)
#endif
  for (int64_t thread = 0; thread < threads; ++thread) {
    try {
      fn(thread);
    } catch (...) {  // none may leave a parallel region
      const std::lock_guard lock(noting);
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

void run_team(int64_t most, FunctionRef<void(int64_t, int64_t)> fn) {
#if defined(_OPENMP)
#pragma omp parallel num_threads(static_cast<int>(most))
  fn(omp_get_thread_num(), omp_get_num_threads());
#else
  (void)most;
  fn(0, 1);
#endif
}

}  // namespace octet

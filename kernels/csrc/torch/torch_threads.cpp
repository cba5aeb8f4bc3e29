// The core's threads are torch's: the number that torch.set_num_threads chose, and none within a parallel region of torch.
#include <ATen/Parallel.h>

#include "core/cpu/threads.h"

namespace octet {

int64_t available_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

void run_threads(int64_t threads, FunctionRef<void(int64_t)> fn) {
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) fn(thread);
  });
}

}  // namespace octet

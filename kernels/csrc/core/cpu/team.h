// Threads that work on the same steps and wait for each other between them, where to start them anew for each step would cost as
// much as the step.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/cpu/threads.h"

namespace octet {

// Where the threads of a team wait for each other. A thread that waits looks for some tens of microseconds, and then sleeps: one of the
// others may have lost its core, and may want this one. After that all sleep at once for some rounds: threads that share a core
// would look in vain each time, which costs more than the work between two rounds.
class Barrier {
 public:
  // Returns when all `threads` have called it as often as this one; what they wrote before is seen after. Throws Stopped once
  // stop() was called.
  void wait(int64_t threads);
  // For a thread that will not call wait() again though others do.
  void stop();

  struct Stopped {};

 private:
  static constexpr uint32_t kStopped = 1, kNext = 2;
  // In cache lines of their own: those who wait only read the second.
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  std::atomic<int> unwatched_{0};  // rounds still to come for which nobody looks
};

// One thread of a team. All of a team call wait() equally often.
struct Member {
  int64_t thread, threads;
  Barrier* barrier;

  void wait() const {
    if (threads > 1) barrier->wait(threads);
  }
};

// fn(member) on each of up to `threads` threads that run at the same time: their number is in `member`, and is known there alone.
// What one throws ends the others at their next wait(), and the caller gets it.
void each_member(int64_t threads, FunctionRef<void(const Member&)> fn);

}  // namespace octet

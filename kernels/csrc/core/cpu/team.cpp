#include "core/cpu/team.h"

#include <exception>
#include <mutex>

namespace octet {
namespace {

// Longer than an interrupt holds a thread up, shorter than a time slice.
constexpr int kLooks = 2048;
// Rounds without a look after one that was in vain.
constexpr int kUnwatched = 16;

// A moment's rest for the core's other thread. On ARM `yield` is no rest at all.
inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace

void Barrier::wait(int64_t threads) {
  // No round begins before this thread has arrived.
  const uint32_t round = round_.load(std::memory_order_relaxed);
  if (round & kStopped) throw Stopped();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
    arrived_.store(0, std::memory_order_relaxed);
    if (const int left = unwatched_.load(std::memory_order_relaxed)) unwatched_.store(left - 1, std::memory_order_relaxed);
    // In one order with the look for sleepers in notify_all: by release alone it could come before a sleeper's last look.
    round_.fetch_add(kNext);
    return round_.notify_all();
  }
  const int looks = unwatched_.load(std::memory_order_relaxed) ? 0 : kLooks;
  uint32_t now = round_.load(std::memory_order_acquire);
  for (int look = 0; now == round && look < looks; now = round_.load(std::memory_order_acquire)) ++look, rest();
  if (now == round && looks) unwatched_.store(kUnwatched, std::memory_order_relaxed);
  for (; now == round; now = round_.load(std::memory_order_acquire)) round_.wait(round, std::memory_order_acquire);
  if (now & kStopped) throw Stopped();
}

void Barrier::stop() {
  round_.fetch_or(kStopped);
  round_.notify_all();
}

void each_member(int64_t threads, FunctionRef<void(const Member&)> fn) {
  if (threads == 1) return fn({0, 1, nullptr});
  Barrier barrier;
  std::exception_ptr first;
  std::mutex noting;
  run_team(threads, [&](int64_t thread, int64_t members) {
    try {
      fn({thread, members, &barrier});
    } catch (const Barrier::Stopped&) {
    } catch (...) {
      {
        const std::lock_guard lock(noting);
        if (!first) first = std::current_exception();
      }
      barrier.stop();
    }
  });
  if (first) std::rethrow_exception(first);
}

}  // namespace octet

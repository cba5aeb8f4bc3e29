// The core's threads (core/cpu/threads.h), of one of three kinds: OpenMP's; a pool of our own, with OCTET_POOL; or the caller's alone.
#include "thread_limit.h"

#include <algorithm>
#include <exception>
#include <mutex>

#include "core/cpu/threads.h"

#if (defined(OCTET_POOL) || defined(_OPENMP)) && !defined(_WIN32)
#define OCTET_FORKS
#include <pthread.h>
#endif

#if defined(OCTET_POOL) || defined(_OPENMP)
#include <condition_variable>
#include <new>
#include <system_error>
#include <thread>
#include <vector>
#endif
#if defined(_OPENMP)
#include <atomic>
#include <omp.h>
#endif

namespace octet {
namespace {

thread_local int64_t limit = 0;

#if defined(OCTET_POOL)
thread_local bool inside = false;  // of work that is shared already

struct Inside {
  Inside() { inside = true; }
  ~Inside() { inside = false; }  // where the system has no more threads to give, too
};

int64_t hardware_threads() { return std::max(1u, std::thread::hardware_concurrency()); }
bool in_parallel() { return inside; }

// Threads that wait for work. One call at a time has them; another that comes meanwhile runs on its own thread alone.
class Pool {
 public:
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& one : workers_) one.join();
  }

  bool run(int64_t threads, const FunctionRef<void(int64_t)>& fn) {
    const std::unique_lock busy(busy_, std::try_to_lock);
    if (!busy || !start(threads - 1)) return false;
    {
      const std::lock_guard lock(mutex_);
      fn_ = &fn, threads_ = threads, left_ = threads - 1, ++round_;
    }
    wake_.notify_all();
    fn(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return left_ == 0; });
    return true;
  }

 private:
  // Whether there are so many threads: where no more can be started, the caller's own does all.
  bool start(int64_t wanted) {
    const std::lock_guard lock(mutex_);
    try {
      workers_.reserve(wanted);
      while (static_cast<int64_t>(workers_.size()) < wanted)
        workers_.emplace_back([this, place = static_cast<int64_t>(workers_.size()) + 1] { work(place); });
    } catch (const std::system_error&) {
      return false;
    } catch (const std::bad_alloc&) {
      return false;
    }
    return true;
  }

  void work(int64_t place) {
    inside = true;
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || (round_ != seen && place < threads_); });
      if (stop_) return;
      seen = round_;
      const FunctionRef<void(int64_t)>& fn = *fn_;
      lock.unlock();
      fn(place);
      lock.lock();
      if (--left_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  const FunctionRef<void(int64_t)>* fn_ = nullptr;
  int64_t threads_ = 0, left_ = 0;
  uint64_t round_ = 0;
  bool stop_ = false;
};

// The pool of a process; a child of a fork has a new one, because the threads of its parent's are not in it.
class OwnPool {
 public:
  OwnPool() {
    new (memory_) Pool;
#if defined(OCTET_FORKS)
    pthread_atfork(nullptr, nullptr, [] { new (own().memory_) Pool; });
#endif
  }
  ~OwnPool() { get().~Pool(); }
  Pool& get() { return *std::launder(reinterpret_cast<Pool*>(memory_)); }

  static OwnPool& own() {
    static OwnPool instance;
    return instance;
  }

 private:
  alignas(Pool) unsigned char memory_[sizeof(Pool)];
};

Pool& pool() { return OwnPool::own().get(); }

void run_shares(int64_t threads, const FunctionRef<void(int64_t)>& fn) {
  const Inside mark;
  if (!pool().run(threads, fn))
    for (int64_t thread = 0; thread < threads; ++thread) fn(thread);
}
#elif defined(_OPENMP)
// Of the calling thread: whether OpenMP has made threads for it, and whether a fork has left them behind, for which it would wait
// for ever.
thread_local bool has_others = false, has_lost_them = false;

void note_others() {
  has_others = true;
#if defined(OCTET_FORKS)
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { has_lost_them = has_others; });
#endif
}

int64_t hardware_threads() { return omp_get_max_threads(); }
bool in_parallel() { return has_lost_them || omp_in_parallel(); }

// How many of `wanted` threads, the caller's among them, can be started. OpenMP ends the process where it cannot start one, so that
// is tried before, until it has gone well once: 20 microseconds a thread. With one to spare, whose memory is left for OpenMP's own.
int64_t startable(int64_t wanted) {
  static std::atomic<int64_t> known{1};
  if (wanted <= known.load(std::memory_order_relaxed)) return wanted;
  std::mutex mutex;
  std::condition_variable all_there;
  bool done = false;
  std::vector<std::thread> threads;
  const auto end = [&] {
    {
      const std::lock_guard lock(mutex);
      done = true;
    }
    all_there.notify_all();
    for (std::thread& one : threads) one.join();
  };
  try {
    threads.reserve(wanted);
    while (static_cast<int64_t>(threads.size()) < wanted)
      threads.emplace_back([&] {
        std::unique_lock lock(mutex);
        all_there.wait(lock, [&] { return done; });
      });
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  end();
  const int64_t started = std::max<int64_t>(1, static_cast<int64_t>(threads.size()));
  if (started == wanted) known = wanted;
  return started;
}

void run_shares(int64_t threads, const FunctionRef<void(int64_t)>& fn) {
  note_others();
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(static, 1)
  for (int64_t thread = 0; thread < threads; ++thread) fn(thread);
}
#else
int64_t hardware_threads() { return 1; }
bool in_parallel() { return true; }

void run_shares(int64_t threads, const FunctionRef<void(int64_t)>& fn) {
  for (int64_t thread = 0; thread < threads; ++thread) fn(thread);
}
#endif

}  // namespace

ThreadLimit::ThreadLimit(int64_t most) : before_(limit) { limit = most; }
ThreadLimit::~ThreadLimit() { limit = before_; }

#if !defined(OCTET_POOL) && defined(_OPENMP)
int64_t available_threads() { return in_parallel() ? 1 : startable(limit ? limit : hardware_threads()); }
#else
int64_t available_threads() { return in_parallel() ? 1 : limit ? limit : hardware_threads(); }
#endif

void run_threads(int64_t threads, FunctionRef<void(int64_t)> fn) {
  std::exception_ptr first;
  std::mutex noting;
  run_shares(threads, [&](int64_t thread) {
    try {
      fn(thread);
    } catch (...) {  // none may leave a thread
      const std::lock_guard lock(noting);
      if (!first) first = std::current_exception();
    }
  });
  if (first) std::rethrow_exception(first);
}

void run_team(int64_t most, FunctionRef<void(int64_t, int64_t)> fn) {
#if defined(OCTET_POOL)
  const Inside mark;
  if (!pool().run(most, [&](int64_t thread) { fn(thread, most); })) fn(0, 1);
#elif defined(_OPENMP)
  note_others();
#pragma omp parallel num_threads(static_cast<int>(most))
  fn(omp_get_thread_num(), omp_get_num_threads());
#else
  (void)most;
  fn(0, 1);
#endif
}

}  // namespace octet

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

#if defined(OCTET_POOL)
#include <condition_variable>
#include <new>
#include <system_error>
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <memory>
#include <new>

#include <omp.h>
#endif

namespace octet {
namespace {

thread_local int64_t limit = 0;

#if defined(OCTET_POOL)
thread_local bool inside = false;  // of work that is shared already

class Inside {
 public:
  Inside() : before_(inside) { inside = true; }
  ~Inside() { inside = before_; }

 private:
  bool before_;
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
// The threads of its last region, itself among them, which OpenMP keeps; and how many it could not start in this call, or 0.
thread_local int64_t team = 1, refused = 0;

#if defined(OCTET_FORKS)
// Only the thread that forks is in the child. So OpenMP ends its others before, those of other libraries' regions too, and starts new
// ones for the next region, in the parent and in the child.
void end_others() {
  if (omp_pause_resource_all(omp_pause_soft) != 0) return;
  has_others = false, team = 1;
}

[[maybe_unused]] const int registered = pthread_atfork(end_others, nullptr, [] { has_lost_them = has_others; });
#endif

int64_t hardware_threads() { return omp_get_max_threads(); }
bool in_parallel() { return has_lost_them || omp_in_parallel(); }

// How many of `wanted` threads can be started now, beside memory for what OpenMP notes of them. OpenMP ends the process where it
// cannot start one, so that is tried before: 20 microseconds a thread.
int64_t startable(int64_t wanted) {
#if defined(OCTET_FORKS)
  constexpr size_t kOwn = 256 << 10, kOfThread = 4 << 10;
  const std::unique_ptr<char[]> noted(new (std::nothrow) char[kOwn + wanted * kOfThread]);
  const std::unique_ptr<pthread_t[]> threads(new (std::nothrow) pthread_t[wanted]);
  if (!noted || !threads) return 0;
  std::mutex gate;
  // Not std::thread: what it frees at its end gives each thread a heap of its own, which takes the room of OpenMP's.
  const auto work = [](void* gate) -> void* {
    const std::lock_guard wait(*static_cast<std::mutex*>(gate));
    return nullptr;
  };
  int64_t started = 0;
  {
    const std::lock_guard lock(gate);
    while (started < wanted && pthread_create(&threads[started], nullptr, work, &gate) == 0) ++started;
  }
  for (int64_t i = 0; i < started; ++i) pthread_join(threads[i], nullptr);
  return started;
#else
  return wanted;
#endif
}

// The threads of a region with work for so many. Never fewer than the last region had, within the limit: OpenMP ends those that one
// region leaves out, and starts them anew for the next, when there may be no memory for them.
int64_t team_for(int64_t threads) {
  if (in_parallel()) return 1;
  const int64_t most = limit ? limit : hardware_threads(), wanted = std::min(threads, most);
  team = std::min(team, most);
  if (wanted > team && (!refused || wanted < refused)) {
    const int64_t there = team + startable(wanted - team);
    if (there < wanted) refused = wanted;
    team = there;
  }
  return team;
}

void run_shares(int64_t threads, const FunctionRef<void(int64_t)>& fn) {
  const int64_t members = team_for(threads);
  const auto share = [&](int64_t first, int64_t step) {
    for (int64_t thread = first; thread < threads; thread += step) fn(thread);
  };
  if (members == 1) return share(0, 1);
  has_others = true;
#pragma omp parallel num_threads(static_cast<int>(members))
  share(omp_get_thread_num(), omp_get_num_threads());
}
#else
int64_t hardware_threads() { return 1; }
bool in_parallel() { return true; }

void run_shares(int64_t threads, const FunctionRef<void(int64_t)>& fn) {
  for (int64_t thread = 0; thread < threads; ++thread) fn(thread);
}
#endif

}  // namespace

ThreadLimit::ThreadLimit(int64_t most) : before_(limit) {
  limit = most;
#if !defined(OCTET_POOL) && defined(_OPENMP)
  refused = 0;
#endif
}
ThreadLimit::~ThreadLimit() { limit = before_; }

int64_t available_threads() { return in_parallel() ? 1 : limit ? limit : hardware_threads(); }

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
  const int64_t members = team_for(most);
  if (members == 1) return fn(0, 1);
  has_others = true;
#pragma omp parallel num_threads(static_cast<int>(members))
  {
    const int64_t thread = omp_get_thread_num(), of_work = std::min<int64_t>(most, omp_get_num_threads());
    if (thread < of_work) fn(thread, of_work);
  }
#else
  (void)most;
  fn(0, 1);
#endif
}

}  // namespace octet

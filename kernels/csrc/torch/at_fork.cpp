#include "torch/at_fork.h"

#include <pthread.h>

#include <mutex>
#include <new>
#include <vector>

namespace octet {
namespace {

struct Mutexes {
  std::mutex adding;
  std::vector<std::shared_mutex*> all;
};

Mutexes& mutexes();

void take_all() {
  mutexes().adding.lock();
  for (std::shared_mutex* const one : mutexes().all) one->lock();
}

void release_all() {
  for (std::shared_mutex* const one : mutexes().all) one->unlock();
  mutexes().adding.unlock();
}

// In the child, whose only thread holds them. glibc tells by the thread's number, which is another now, whether the writer
// releases a shared mutex or a reader, so they are made anew.
void renew_all() {
  for (std::shared_mutex* const one : mutexes().all) new (one) std::shared_mutex;
  mutexes().adding.unlock();
}

Mutexes& mutexes() {
  static Mutexes* const instance = [] {
    auto* const made = new Mutexes;
    pthread_atfork(take_all, release_all, renew_all);
    return made;
  }();
  return *instance;
}

}  // namespace

ForkedMutex::ForkedMutex() {
  const std::lock_guard lock(mutexes().adding);
  mutexes().all.push_back(this);
}

}  // namespace octet

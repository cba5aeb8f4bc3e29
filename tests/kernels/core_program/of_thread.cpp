// What a thread keeps, asked for again by what ends later in the same thread: made as often as ended.
#include "core/cpu/of_thread.h"

#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

namespace {

std::atomic<int> made{0}, ended{0};

struct Kept {
  std::vector<int> values{1, 2, 3};
  Kept() { ++made; }
  ~Kept() { ++ended; }
};

Kept& kept() {
  thread_local Kept* own = nullptr;
  return octet::of_thread(own);
}

int sum = 0;

}  // namespace

int main() {
  kept();  // so that the library's key is older than this one, and ends before it
  pthread_key_t key;
  pthread_key_create(&key, [](void*) {
    for (int value : kept().values) sum += value;
  });
  std::thread([&] {
    kept();
    pthread_setspecific(key, &key);
  }).join();
  std::printf("%d %d %d\n", made.load(), ended.load(), sum);
}

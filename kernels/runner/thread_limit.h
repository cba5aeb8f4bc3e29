// How many threads the work of this thread's calls is shared among; thread_limit.cpp brings the core's two functions.
#pragma once

#include <cstdint>

namespace octet {

// While it lives, what this thread calls uses `most` threads; 0 for as many as there are.
class ThreadLimit {
 public:
  explicit ThreadLimit(int64_t most);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;

 private:
  int64_t before_;
};

}  // namespace octet

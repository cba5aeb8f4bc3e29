// A program of threads that wait for each other (core/cpu/team.h), for tests of the barrier: its own threads take the place of
// OpenMP's, which a thread sanitizer cannot see.
//
//   team rounds MEMBERS ROUNDS   every member reads in each round what all wrote in the one before; prints the rounds that were right
//   team throw MEMBERS           one member throws while the others wait; prints what the caller caught
//   team crowded MEMBERS ROUNDS  all members share one core; prints the microseconds of CPU time that a round took
//   team fewer MEMBERS           only one thread exists; prints how many members there were
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/cpu/team.h"

namespace {

bool alone = false;

}  // namespace

namespace octet {

int64_t available_threads() { return 64; }
void run_threads(int64_t, FunctionRef<void(int64_t)>) { std::abort(); }
void run_team(int64_t most, FunctionRef<void(int64_t, int64_t)> fn) {
  if (alone) return fn(0, 1);
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < most; ++thread) threads.emplace_back([&, thread] { fn(thread, most); });
  for (std::thread& one : threads) one.join();
}

}  // namespace octet

namespace {

void rounds(int64_t members, int64_t count) {
  std::vector<int64_t> written[2] = {std::vector<int64_t>(members), std::vector<int64_t>(members)}, right(members);
  octet::each_member(members, [&](const octet::Member& member) {
    for (int64_t round = 1; round <= count; ++round) {
      written[round % 2][member.thread] = round;
      member.wait();
      bool all = true;
      for (int64_t value : written[round % 2]) all &= value == round;
      right[member.thread] += all;
    }
  });
  for (int64_t each : right) std::printf("%lld ", static_cast<long long>(each));
}

void crowded(int64_t members, int64_t count) {
  cpu_set_t all, one;
  sched_getaffinity(0, sizeof all, &all);
  int core = 0;
  while (!CPU_ISSET(core, &all)) ++core;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  sched_setaffinity(0, sizeof one, &one);
  const std::clock_t begin = std::clock();
  octet::each_member(members, [&](const octet::Member& member) {
    for (int64_t round = 0; round < count; ++round) member.wait();
  });
  std::printf("%g", 1e6 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC / static_cast<double>(count));
}

void one_throws(int64_t members) {
  try {
    octet::each_member(members, [&](const octet::Member& member) {
      member.wait();
      if (member.thread == members - 1) throw std::runtime_error("the last one");
      member.wait();
      member.wait();
      std::printf("waited for nobody ");
    });
  } catch (const std::exception& error) {
    std::printf("%s", error.what());
  }
}

}  // namespace

int main(int, char** arguments) {
  const int64_t members = std::atoll(arguments[2]);
  if (!std::strcmp(arguments[1], "rounds")) rounds(members, std::atoll(arguments[3]));
  if (!std::strcmp(arguments[1], "crowded")) crowded(members, std::atoll(arguments[3]));
  if (!std::strcmp(arguments[1], "throw")) one_throws(members);
  if (!std::strcmp(arguments[1], "fewer")) {
    alone = true;
    octet::each_member(members, [](const octet::Member& member) {
      member.wait();
      std::printf("%lld", static_cast<long long>(member.threads));
    });
  }
}

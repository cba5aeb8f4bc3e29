// `make stress-runner`: many threads on models that are opened and closed meanwhile, and the memory that is left of it.
//     stress SECONDS THREADS SEED FILE...
// Each file is opened once for what one thread gives for many sizes of inputs, more than there are plans kept. In each round the files
// are opened anew, all threads make the same first call at once, and then calls of mixed sizes, good ones and bad ones, while one opens and
// closes models of its own. Outputs have the bits of one thread, errors are those of their thread, and what is allocated when all is
// closed is what was after the first rounds. Built with threads of our own (OCTET_POOL), which ThreadSanitizer sees.
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "octet.h"

namespace {

using Random = std::mt19937_64;

constexpr size_t kSizes = 80;               // of inputs of each file: 64 plans are kept
constexpr int kTries = 40;                  // of inputs for each
constexpr int kCallsOfRound = 48;           // of each thread
constexpr int64_t kMostGrown = 64 << 10;    // bytes: what a leak of one object a round is beyond after some rounds
constexpr uint64_t kWarmRounds = 2;         // until each file was opened and every lock and buffer of the process exists

struct Problems {
  std::mutex mutex;
  uint64_t count = 0;

  void note(const std::string& words) {
    const std::lock_guard lock(mutex);
    if (++count <= 20) std::fprintf(stderr, "stress: %s\n", words.c_str());
  }
};

int64_t width(octet_dtype dtype) { return dtype == OCTET_FLOAT32 ? 4 : dtype == OCTET_INT64 ? 8 : 1; }

int64_t bytes_of(const octet_tensor& tensor) {
  int64_t last = 0;
  for (int d = 0; d < tensor.rank; ++d) {
    if (tensor.sizes[d] == 0) return 0;
    last += (tensor.sizes[d] - 1) * tensor.strides[d];
  }
  return (last + 1) * width(tensor.dtype);
}

// Tensors, and their values.
struct Values {
  std::vector<octet_tensor> tensors;
  std::vector<std::vector<int64_t>> memory;  // words, so that all are aligned

  void allocate() {
    memory.clear();
    for (octet_tensor& tensor : tensors) {
      memory.emplace_back(static_cast<size_t>(bytes_of(tensor) / 8 + 1), 0);
      tensor.data = memory.back().data();
    }
  }
  bool equals(const Values& other) const { return memory == other.memory; }
};

// The inputs of a call, and the outputs that one thread gave.
struct Call {
  Values inputs, outputs;
};

struct File {
  std::string path;
  std::vector<Call> calls;
};

octet_status run(octet_model* model, const Values& inputs, Values& outputs) {
  outputs.tensors.assign(static_cast<size_t>(octet_output_count(model)), octet_tensor{});
  const octet_status planned = octet_plan(model, inputs.tensors.data(), outputs.tensors.data());
  if (planned != OCTET_OK) return planned;
  outputs.allocate();
  return octet_run(model, inputs.tensors.data(), outputs.tensors.data());
}

// Inputs of sizes that a model may take: one size for all that are free, or one for each.
Values drawn(const octet_model* model, Random& random) {
  Values inputs;
  const int64_t common = random() % 2 ? 1 + static_cast<int64_t>(random() % 40) : 0;
  for (int32_t i = 0; i < octet_input_count(model); ++i) {
    octet_value value{};
    octet_describe_input(model, i, &value);
    octet_tensor tensor{};
    tensor.dtype = value.dtype, tensor.rank = std::max(value.rank, 0);
    int64_t step = 1;
    for (int d = tensor.rank; d-- > 0; step *= std::max<int64_t>(tensor.sizes[d], 1)) {
      const int64_t free = common && i ? common : 1 + static_cast<int64_t>(random() % (d == 0 && tensor.rank > 2 ? 4 : 40));
      tensor.sizes[d] = value.sizes[d] < 0 ? (common && tensor.rank < 3 ? common : free) : value.sizes[d];
      tensor.strides[d] = step;
    }
    inputs.tensors.push_back(tensor);
  }
  inputs.allocate();
  for (octet_tensor& tensor : inputs.tensors) {
    const int64_t count = bytes_of(tensor) / width(tensor.dtype);
    for (int64_t at = 0; at < count; ++at) {
      if (tensor.dtype == OCTET_FLOAT32)
        static_cast<float*>(tensor.data)[at] = static_cast<float>(static_cast<int64_t>(random() % 4001) - 2000) / 1000;
      else if (tensor.dtype == OCTET_INT64)
        static_cast<int64_t*>(tensor.data)[at] = static_cast<int64_t>(random() % 12);
      else
        static_cast<uint8_t*>(tensor.data)[at] = static_cast<uint8_t>(random() % 2);
    }
  }
  return inputs;
}

octet_model* opened(const std::string& path) {
  octet_model* const model = octet_open(path.c_str());
  if (!model) {
    std::fprintf(stderr, "stress: %s\n", octet_error());
    std::exit(2);
  }
  return model;
}

// What one thread gives.
File alone(const char* path, Random& random) {
  File file{path, {}};
  octet_model* const model = opened(path);
  octet_set_threads(model, 1);
  for (int left = kTries * static_cast<int>(kSizes); left > 0 && file.calls.size() < kSizes; --left) {
    Call call{drawn(model, random), {}};
    if (run(model, call.inputs, call.outputs) == OCTET_OK) file.calls.push_back(std::move(call));
  }
  if (file.calls.size() < 2) {
    std::fprintf(stderr, "stress: %s runs for none of the inputs that are tried: %s\n", path, octet_error());
    std::exit(2);
  }
  octet_close(model);
  return file;
}

// A call that is refused: its rank names the thread.
void refused(octet_model* model, const Call& call, int64_t thread, Problems& problems) {
  Values inputs = call.inputs, outputs;
  const int32_t rank = 100 + static_cast<int32_t>(thread);
  inputs.tensors[0].rank = rank;
  const octet_status status = run(model, inputs, outputs);
  std::this_thread::yield();
  const std::string words = octet_error(), expected = " has " + std::to_string(rank) + " dimensions, ";
  if (status != OCTET_BAD_INPUT || words.find(expected) == std::string::npos)
    problems.note("a call of rank " + std::to_string(rank) + " has status " + std::to_string(status) + ": " + words);
}

void check(octet_model* model, const File& file, size_t place, Problems& problems) {
  Values outputs;
  const Call& call = file.calls[place % file.calls.size()];
  if (run(model, call.inputs, outputs) != OCTET_OK)
    problems.note(file.path + ", call " + std::to_string(place) + ": " + octet_error());
  else if (!outputs.equals(call.outputs))
    problems.note(file.path + ", call " + std::to_string(place) + ": not what one thread gives");
}

struct Campaign {
  std::vector<File> files;
  int64_t threads;
  uint64_t seed;
  Problems problems;
  std::atomic<uint64_t> calls{0}, refusals{0}, opens{0};

  // Calls of one thread: the same first ones as all others', then others'.
  void work(const std::vector<octet_model*>& models, int64_t thread, uint64_t round, std::barrier<>& begin) {
    Random random(seed + 1000 * round + static_cast<uint64_t>(thread));
    for (size_t one = 0; one < models.size(); ++one) {
      begin.arrive_and_wait();
      check(models[one], files[one], round, problems);
    }
    for (int left = kCallsOfRound; left > 0; --left) {
      const size_t one = random() % models.size();
      check(models[one], files[one], random() % kSizes, problems);
      if (random() % 8 == 0) refused(models[one], files[one].calls[0], thread, problems), ++refusals;
    }
    calls += models.size() + kCallsOfRound;
  }

  // Models of this thread alone, until the others are done.
  void open_and_close(uint64_t round, const std::atomic<bool>& done) {
    Random random(seed + 1000 * round + 999);
    do {
      const File& file = files[random() % files.size()];
      octet_model* const model = opened(file.path);
      octet_set_threads(model, static_cast<int32_t>(random() % 4));
      for (int left = 3; left > 0; --left) check(model, file, random() % kSizes, problems);
      octet_close(model);
      calls += 3, ++opens;
    } while (!done.load());
  }

  void play(uint64_t round) {
    std::vector<octet_model*> models;
    for (const File& file : files) {
      models.push_back(opened(file.path));
      // One call at a time has the pool; the others run alone.
      octet_set_threads(models.back(), static_cast<int32_t>(1 + (round + models.size()) % 3));
    }
    opens += models.size();
    std::barrier begin(threads);
    std::atomic<bool> done{false};
    std::vector<std::thread> workers;
    for (int64_t thread = 0; thread < threads; ++thread) workers.emplace_back([&, thread] { work(models, thread, round, begin); });
    std::thread opening([&] { open_and_close(round, done); });
    for (std::thread& one : workers) one.join();
    done = true;
    opening.join();
    for (octet_model* const model : models) octet_close(model);
  }
};

// Bytes that are allocated and not freed; 0 under a sanitizer, which has memory of its own.
int64_t allocated() {
  const struct mallinfo2 now = mallinfo2();
  return static_cast<int64_t>(now.uordblks + now.hblkhd);
}

int64_t resident() {
  long pages = 0, all = 0;
  std::ifstream("/proc/self/statm") >> all >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 5) {
    std::fprintf(stderr, "usage: stress SECONDS THREADS SEED FILE...\n");
    return 2;
  }
  const double seconds = std::strtod(arguments[1], nullptr);
  Campaign campaign{{}, std::strtoll(arguments[2], nullptr, 10), std::strtoull(arguments[3], nullptr, 10), {}};
  Random random(campaign.seed);
  for (int i = 4; i < count; ++i) campaign.files.push_back(alone(arguments[i], random));
  const auto begin = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  int64_t allocated_before = 0, resident_before = 0;
  uint64_t round = 0;
  for (; round <= kWarmRounds || passed() < seconds; ++round) {
    if (round == kWarmRounds) allocated_before = allocated(), resident_before = resident();
    campaign.play(round);
  }
  const int64_t grown = allocated() - allocated_before;
  if (grown > kMostGrown) campaign.problems.note("there are " + std::to_string(grown) + " bytes more after all models are closed");
  std::printf("%llu calls of %zu models by %lld threads in %llu rounds, %llu refused, %llu models opened and closed; "
              "%lld bytes more allocated than after %llu rounds, %lld more resident; %llu wrong\n",
              static_cast<unsigned long long>(campaign.calls), campaign.files.size(), static_cast<long long>(campaign.threads),
              static_cast<unsigned long long>(round), static_cast<unsigned long long>(campaign.refusals),
              static_cast<unsigned long long>(campaign.opens), static_cast<long long>(grown),
              static_cast<unsigned long long>(kWarmRounds), static_cast<long long>(resident() - resident_before),
              static_cast<unsigned long long>(campaign.problems.count));
  return campaign.problems.count ? 1 : 0;
}

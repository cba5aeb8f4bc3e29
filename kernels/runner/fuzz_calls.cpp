// `make fuzz-runner-calls`: random sequences of calls of the C API, most of them wrong, in processes of their own.
//     fuzz_calls COUNT SEED FILE...
// A sequence passes where every call returns, wrong ones are refused with words, and a right call before, between and behind them gives
// the same bytes. Operands end at a page that nobody may touch, and begin behind one.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "octet.h"

namespace {

using Random = std::mt19937_64;

constexpr uint64_t kSequencesOfProcess = 200;
constexpr int kMostSeconds = 120;  // of CPU time, for so many
constexpr int kSteps = 24;         // of one sequence, at most

uint64_t now_running = 0;

[[noreturn]] void wrong(const char* what) {
  std::fprintf(stderr, "fuzz_calls: sequence %llu: %s: %s\n", static_cast<unsigned long long>(now_running), what, octet_error());
  std::_Exit(3);
}
void expect(bool holds, const char* what) {
  if (!holds) wrong(what);
}

// Bytes between two pages that must not be touched.
class Guarded {
 public:
  Guarded(size_t bytes, size_t item) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    inner_ = (bytes + page - 1) / page * page + (bytes ? 0 : page);
    whole_ = static_cast<uint8_t*>(mmap(nullptr, inner_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (whole_ == MAP_FAILED || mprotect(whole_ + page, inner_, PROT_READ | PROT_WRITE)) std::_Exit(4);
    data_ = whole_ + page + (inner_ - bytes) / item * item;
    size_ = inner_ + 2 * page;
  }
  Guarded(Guarded&& other) noexcept : whole_(other.whole_), data_(other.data_), bytes_(other.bytes_), inner_(other.inner_), size_(other.size_) { other.whole_ = nullptr; }
  Guarded(const Guarded&) = delete;
  ~Guarded() {
    if (whole_) munmap(whole_, size_);
  }
  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  uint8_t *whole_, *data_;
  size_t bytes_, inner_, size_;
};

size_t item_of(octet_dtype dtype) { return dtype == OCTET_FLOAT32 ? 4 : dtype == OCTET_INT64 ? 8 : 1; }

size_t bytes_of(const octet_tensor& tensor) {
  int64_t last = 0;
  for (int d = 0; d < tensor.rank; ++d) {
    if (tensor.sizes[d] == 0) return 0;
    last += (tensor.sizes[d] - 1) * tensor.strides[d];
  }
  return static_cast<size_t>(last + 1) * item_of(tensor.dtype);
}

// Tensors and their memory.
struct Tensors {
  std::vector<octet_tensor> tensors;
  std::vector<Guarded> memory;

  void allocate() {
    memory.clear();
    for (octet_tensor& one : tensors) {
      memory.emplace_back(bytes_of(one), item_of(one.dtype));
      one.data = memory.back().data();
    }
  }
};

// Inputs that the model takes: free sizes are all the same, or what a few tries find.
Tensors inputs_for(const octet_model* model, int64_t common, Random& random) {
  Tensors made;
  for (int32_t i = 0; i < octet_input_count(model); ++i) {
    octet_value value{};
    expect(octet_describe_input(model, i, &value) == OCTET_OK && value.name, "an input that is there has no description");
    octet_tensor tensor{};
    tensor.dtype = value.dtype, tensor.rank = value.rank < 0 ? 2 : value.rank;
    int64_t step = 1;
    for (int d = tensor.rank; d-- > 0; step *= std::max<int64_t>(tensor.sizes[d], 1))
      tensor.sizes[d] = value.sizes[d] < 0 ? common : value.sizes[d], tensor.strides[d] = step;
    made.tensors.push_back(tensor);
  }
  made.allocate();
  for (size_t i = 0; i < made.tensors.size(); ++i) {
    const size_t count = made.memory[i].bytes() / item_of(made.tensors[i].dtype);
    for (size_t k = 0; k < count; ++k) {
      if (made.tensors[i].dtype == OCTET_FLOAT32) reinterpret_cast<float*>(made.memory[i].data())[k] = static_cast<float>(random() % 2001) / 500 - 2;
      else if (made.tensors[i].dtype == OCTET_INT64) reinterpret_cast<int64_t*>(made.memory[i].data())[k] = static_cast<int64_t>(random() % 4);
      else made.memory[i].data()[k] = static_cast<uint8_t>(random() % 2);
    }
  }
  return made;
}

// A model, with a call that is right and the bytes that it gives.
struct Known {
  octet_model* model = nullptr;
  Tensors inputs;
  std::vector<octet_tensor> outputs;
  std::vector<std::string> bytes;

  bool find(Random& random) {
    for (int64_t common : {2, 1, 3, 4, 8, 16, 24, 32}) {
      inputs = inputs_for(model, common, random);
      outputs.assign(static_cast<size_t>(octet_output_count(model)), octet_tensor{});
      if (octet_plan(model, inputs.tensors.data(), outputs.data()) == OCTET_OK && run(true)) return true;
    }
    return false;
  }

  // The right call; whether it ran, when it is the first.
  bool run(bool first) {
    Tensors results{outputs, {}};
    results.allocate();
    const octet_status status = octet_run(model, inputs.tensors.data(), results.tensors.data());
    if (first && status != OCTET_OK) return false;
    expect(status == OCTET_OK, "a right call was refused");
    for (size_t i = 0; i < results.memory.size(); ++i) {
      const std::string given(reinterpret_cast<const char*>(results.memory[i].data()), results.memory[i].bytes());
      if (first) bytes.push_back(given);
      else expect(given == bytes[i], "a right call gives other bytes");
    }
    return true;
  }
};

constexpr int64_t kSizes[] = {0, 1, 2, 3, 7, 64, 1000, -1, -7, INT64_MAX, INT64_MIN, int64_t{1} << 40, int64_t{1} << 20, int64_t{1} << 62, (int64_t{1} << 40) + 1};
constexpr int32_t kRanks[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 16, -1, INT32_MAX, INT32_MIN};

template <class T, size_t N>
T one_of(const T (&values)[N], Random& random) { return values[random() % N]; }

// What is wrong with one tensor; its memory is not touched where a call is refused.
void spoil(octet_tensor& tensor, Random& random) {
  const int d = static_cast<int>(random() % OCTET_MOST_DIMENSIONS);
  switch (random() % 5) {
    case 0: tensor.dtype = static_cast<octet_dtype>(one_of({0, 1, 2, 3, 4, 77, -1, INT32_MAX, INT32_MIN}, random)); break;
    case 1: tensor.rank = one_of(kRanks, random); break;
    case 2: tensor.sizes[d] = one_of(kSizes, random); break;
    case 3: tensor.strides[d] = one_of(kSizes, random); break;
    default: std::swap(tensor.sizes[0], tensor.sizes[1]);
  }
}

void refused(octet_status status, const char* what) {
  expect(status != OCTET_OK, what);
  expect(octet_error() && *octet_error(), "a call was refused without words");
}

// A plan for inputs that may be wrong, and a run where it is small enough; its inputs hold zeros.
void try_other(octet_model* model, const Known& known, Random& random) {
  Tensors given{known.inputs.tensors, {}};
  for (uint64_t left = 1 + random() % 3; left > 0 && !given.tensors.empty(); --left) spoil(given.tensors[random() % given.tensors.size()], random);
  std::vector<octet_tensor> outputs(known.outputs.size());
  const octet_status status = octet_plan(model, given.tensors.data(), outputs.data());
  if (status != OCTET_OK) {
    expect(*octet_error(), "a plan was refused without words");
    if (random() % 4 == 0) refused(octet_run(model, given.tensors.data(), outputs.data()), "a run whose plan was refused came through");
    return;
  }
  const auto is_small = [](const octet_tensor& one) {
    for (int d = 0; d < one.rank; ++d)
      if (one.sizes[d] > 4096 || one.strides[d] > (1 << 20)) return false;
    return bytes_of(one) < (1 << 22);
  };
  if (!std::all_of(given.tensors.begin(), given.tensors.end(), is_small) || !std::all_of(outputs.begin(), outputs.end(), is_small)) return;
  given.allocate();
  Tensors results{outputs, {}};
  results.allocate();
  octet_run(model, given.tensors.data(), results.tensors.data());
}

// A run of the right sizes with one thing that the library can see to be wrong.
void try_bad_data(octet_model* model, const Known& known, Random& random) {
  std::vector<octet_tensor> inputs = known.inputs.tensors, outputs = known.outputs;
  Tensors results{outputs, {}};
  results.allocate();
  outputs = results.tensors;
  std::vector<octet_tensor>& side = random() % 2 && !inputs.empty() ? inputs : outputs;
  octet_tensor& one = side[random() % side.size()];
  switch (random() % 4) {
    case 0: one.data = nullptr; refused(octet_run(model, inputs.data(), outputs.data()), "a tensor without data was taken"); break;
    case 1:
      if (item_of(one.dtype) > 1) {
        one.data = static_cast<uint8_t*>(one.data) + 1;
        refused(octet_run(model, inputs.data(), outputs.data()), "data that is not aligned was taken");
      }
      break;
    case 2: refused(octet_run(model, nullptr, outputs.data()), "no inputs were taken"); break;
    default: refused(octet_run(model, inputs.data(), nullptr), "no outputs were taken");
  }
}

void try_nothing(Random& random) {
  octet_value value{};
  octet_tensor tensor{};
  expect(octet_input_count(nullptr) == 0 && octet_output_count(nullptr) == 0, "NULL has inputs or outputs");
  octet_close(nullptr);
  switch (random() % 7) {
    case 0: refused(octet_describe_input(nullptr, 0, &value), "NULL was described"); break;
    case 1: refused(octet_describe_output(nullptr, 0, &value), "NULL was described"); break;
    case 2: refused(octet_set_threads(nullptr, 1), "NULL has threads"); break;
    case 3: refused(octet_plan(nullptr, &tensor, &tensor), "NULL has a plan"); break;
    case 4: refused(octet_run(nullptr, &tensor, &tensor), "NULL ran"); break;
    case 5: expect(!octet_open(one_of<const char*>({nullptr, "", "/", "/dev/null", "no such file", "/proc/self/mem"}, random)) && *octet_error(), "what is no file was opened"); break;
    default: expect(!octet_open_memory(nullptr, random() % 2 ? 0 : 1000) && *octet_error(), "nothing was opened");
  }
}

void try_descriptions(octet_model* model, Random& random) {
  octet_value value{};
  const int32_t index = one_of({0, 1, 2, 3, 100, -1, INT32_MAX, INT32_MIN}, random);
  const bool of_input = random() % 2;
  const int32_t count = of_input ? octet_input_count(model) : octet_output_count(model);
  octet_value* const place = random() % 8 ? &value : nullptr;
  const octet_status status = of_input ? octet_describe_input(model, index, place) : octet_describe_output(model, index, place);
  expect((status == OCTET_OK) == (index >= 0 && index < count && place), "a description that should not be, or none");
  if (status == OCTET_OK) expect(value.name && value.rank >= -1 && value.rank <= OCTET_MOST_DIMENSIONS, "a description that is none");
}

// Another thread's errors are not this one's, and models may be used by several at once.
void try_threads(Known& known, Random& random) {
  refused(octet_plan(nullptr, nullptr, nullptr), "NULL has a plan");
  const std::string said = octet_error();
  std::vector<std::thread> threads;
  for (uint64_t left = 1 + random() % 3; left > 0; --left)
    threads.emplace_back([&known, seed = random()] {
      Random own(seed);
      expect(!*octet_error(), "a new thread has an error");
      for (int step = 0; step < 3; ++step) {
        if (own() % 2) try_other(known.model, known, own);
        if (own() % 4 == 0) expect(octet_set_threads(known.model, static_cast<int32_t>(own() % 3)) == OCTET_OK, "a number of threads was refused");
        known.run(false);
      }
    });
  for (std::thread& one : threads) one.join();
  expect(said == octet_error(), "another thread's error is this one's");
}

octet_model* open(const std::string& file, const char* path, Random& random) {
  if (random() % 2) return octet_open(path);
  Guarded memory(file.size(), 1);  // freed after the call, as the contract allows
  std::memcpy(memory.data(), file.data(), file.size());
  return octet_open_memory(memory.data(), file.size());
}

void run_sequence(const std::vector<std::string>& files, char** paths, uint64_t seed) {
  Random random(seed);
  std::vector<Known> models(1 + random() % 3);
  for (Known& one : models) {
    const size_t which = random() % files.size();
    one.model = open(files[which], paths[which], random);
    expect(one.model, "a whole file was not opened");
    if (random() % 4 == 0) {  // before any plan
      std::vector<octet_tensor> outputs(static_cast<size_t>(octet_output_count(one.model)));
      refused(octet_run(one.model, nullptr, outputs.data()), "no inputs were taken");
    }
    expect(one.find(random), "a whole file ran for none of the inputs");
  }
  for (uint64_t left = random() % kSteps; left > 0; --left) {
    Known& one = models[random() % models.size()];
    if (!one.model) continue;
    switch (random() % 9) {
      case 0: try_nothing(random); break;
      case 1: try_descriptions(one.model, random); break;
      case 2: case 3: try_other(one.model, one, random); break;
      case 4: try_bad_data(one.model, one, random); break;
      case 5: try_threads(one, random); break;
      case 6: {
        const int32_t threads = one_of({0, 1, 2, 1024, 1025, -1, INT32_MAX, INT32_MIN}, random);
        expect((octet_set_threads(one.model, threads) == OCTET_OK) == (threads >= 0 && threads <= 1024), "a number of threads");
        if (threads == 0 || threads == 1024) octet_set_threads(one.model, 2);
        break;
      }
      case 7:
        octet_close(one.model);
        one.model = nullptr;
        break;
      default: one.run(false);
    }
  }
  for (Known& one : models)
    if (one.model) one.run(false), octet_close(one.model);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) {
    std::fprintf(stderr, "usage: fuzz_calls COUNT SEED FILE...\n");
    return 2;
  }
  const uint64_t sequences = std::strtoull(arguments[1], nullptr, 10), seed = std::strtoull(arguments[2], nullptr, 10);
  std::vector<std::string> files;
  for (int i = 3; i < count; ++i) {
    std::ifstream file(arguments[i], std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  auto* const progress = static_cast<uint64_t*>(mmap(nullptr, sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (progress == MAP_FAILED) return 2;
  uint64_t failures = 0;
  while (*progress < sequences) {
    const pid_t child = fork();
    if (child == 0) {
      const rlimit limit = {kMostSeconds, kMostSeconds + 1};
      setrlimit(RLIMIT_CPU, &limit);
      for (uint64_t left = kSequencesOfProcess; left > 0 && *progress < sequences; --left, ++*progress) {
        now_running = seed + *progress;
        run_sequence(files, arguments + 3, now_running);
      }
      std::_Exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) < 0) return 2;
    if (status == 0) continue;
    ++failures;
    std::fprintf(stderr, "fuzz_calls: sequence %llu ended the process with status %d\n", static_cast<unsigned long long>(seed + *progress), status);
    ++*progress;
  }
  std::printf("%llu sequences of calls, %llu failures\n", static_cast<unsigned long long>(sequences), static_cast<unsigned long long>(failures));
  return failures ? 1 : 0;
}

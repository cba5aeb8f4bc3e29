// `make fuzz-runner`: alters files and runs what is left of them under AddressSanitizer, in a process that is begun anew where one ends.
//     fuzz COUNT SEED FOLDER FILE...
// A case passes where every call returns, whatever it says. One that ends the process is written to FOLDER, and fails the whole.
// Compiled so that checksums match whatever they are (artefact.cpp): else hardly anything altered would get behind them.
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "octet.h"

namespace {

constexpr size_t kMostBytes = size_t{1} << 28;  // of one allocation: beyond it there is no memory
constexpr int kMostSeconds = 1;                 // of CPU time for one case: what computes longer is stopped, and no fault
constexpr int kMostWaiting = 300;               // seconds of one case by the clock: what waits for itself is a fault
constexpr uint64_t kCasesOfProcess = 2000;      // then memory is given back
constexpr int kTries = 200;                     // of inputs for a file that is whole

}  // namespace

// AddressSanitizer's own `new` ends the process where there is no memory, and may not throw.
void* operator new(size_t size) {
  void* const memory = size > kMostBytes ? nullptr : std::malloc(size ? size : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void* operator new(size_t size, const std::nothrow_t&) noexcept { return size > kMostBytes ? nullptr : std::malloc(size ? size : 1); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

using Random = std::mt19937_64;

size_t below(Random& random, size_t count) { return count ? random() % count : 0; }

constexpr const char* kNumbers[] = {"0", "1", "-1", "2", "3", "7", "64", "255", "256", "65536", "16777216", "2147483648", "9223372036854775807",
                                    "-9223372036854775808", "1e308", "0.5", "-", "True", "nearest"};

// The header's text, whose numbers are found by their first digit.
struct File {
  std::string header, data;

  explicit File(const std::string& bytes) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    header = bytes.substr(sizeof length, length), data = bytes.substr(sizeof length + length);
  }
  std::string bytes() const {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + data;
  }
};

// Where the runner's part begins: most of what is altered lies behind it, because the rest is Python's.
size_t begin_of_document(const std::string& header) {
  const size_t found = header.find("\"octet_runner\"");
  return found == std::string::npos ? 0 : found;
}

bool in_word(char sign) { return std::isalnum(static_cast<unsigned char>(sign)) || sign == '_' || sign == '.' || sign == '-'; }

// The word at or behind a place.
std::pair<size_t, size_t> word_at(const std::string& text, size_t at) {
  while (at < text.size() && !in_word(text[at])) ++at;
  size_t begin = at, end = at;
  while (begin > 0 && in_word(text[begin - 1])) --begin;
  while (end < text.size() && in_word(text[end])) ++end;
  return {begin, end - begin};
}

// A number a little or much larger or smaller; a word of a plan stays as it is.
void alter_number(std::string& text, size_t word, size_t length, Random& random) {
  const std::string digits = text.substr(word, length);
  char* end = nullptr;
  const long long number = std::strtoll(digits.c_str(), &end, 10);
  if (*end || digits.empty()) return;
  const long long others[] = {number + 1, number - 1, number * 2, number / 2, -number, 0, 1, number + static_cast<long long>(random() % 64)};
  text.replace(word, length, std::to_string(others[random() % std::size(others)]));
}

void alter_text(std::string& text, Random& random) {
  const size_t begin = random() % 4 ? begin_of_document(text) : 0, at = begin + below(random, text.size() - begin);
  const size_t other = begin + below(random, text.size() - begin);
  const auto [word, length] = word_at(text, at);
  switch (random() % 32) {
    case 0: text[at] = static_cast<char>(random()); break;
    case 1: text.erase(at, 1 + below(random, 16)); break;
    case 2: text.insert(at, text.substr(other, 1 + below(random, 40))); break;
    case 3: {
      const auto [source, count] = word_at(text, other);
      text.replace(word, length, text.substr(source, count));
      break;
    }
    case 4: text[at] ^= static_cast<char>(1 << random() % 8); break;
    case 5: case 6: text.replace(word, length, kNumbers[below(random, std::size(kNumbers))]); break;
    default: alter_number(text, word, length, random);
  }
}

std::string altered(const std::string& original, Random& random) {
  File file(original);
  for (size_t left = 1 + below(random, 3); left > 0 && !file.header.empty(); --left) alter_text(file.header, random);
  if (random() % 4 == 0)
    for (int left = 8; left > 0 && !file.data.empty(); --left) file.data[below(random, file.data.size())] = static_cast<char>(random());
  std::string bytes = file.bytes();
  if (random() % 16 == 0) bytes.resize(below(random, bytes.size()));
  if (random() % 16 == 0 && bytes.size() >= 8) bytes[below(random, 8)] ^= static_cast<char>(1 << random() % 8);
  return bytes;
}

// A tensor of the sizes that a model names, in memory that is exactly as large, so that the first byte beyond it is noticed.
struct Memory {
  octet_tensor tensor{};
  ~Memory() { std::free(tensor.data); }

  bool allocate() {
    int64_t last = 0;
    bool is_empty = false;
    for (int d = 0; d < tensor.rank; ++d) {
      if (tensor.sizes[d] > (1 << 20) || tensor.strides[d] > (1 << 26)) return false;
      is_empty |= tensor.sizes[d] == 0, last += (tensor.sizes[d] - 1) * tensor.strides[d];
    }
    const int64_t bytes = (is_empty ? 1 : last + 1) * (tensor.dtype == OCTET_FLOAT32 ? 4 : tensor.dtype == OCTET_INT64 ? 8 : 1);
    if (bytes > static_cast<int64_t>(kMostBytes)) return false;
    tensor.data = std::calloc(1, bytes);
    return tensor.data;
  }
};

// `common` for each size that is free, or 0: others for each.
void describe(const octet_model* model, int32_t index, int64_t common, Random& random, octet_tensor& tensor) {
  octet_value value{};
  octet_describe_input(model, index, &value);
  tensor.dtype = value.dtype, tensor.rank = value.rank < 0 ? static_cast<int32_t>(random() % 5) : value.rank;
  int64_t step = 1;
  for (int d = tensor.rank; d-- > 0; step *= std::max<int64_t>(tensor.sizes[d], 1)) {
    const int64_t free = common ? common : random() % 16 == 0 ? 0 : 1 + static_cast<int64_t>(below(random, 24));
    tensor.sizes[d] = value.sizes[d] < 0 || random() % 32 == 0 ? free : value.sizes[d];
    tensor.strides[d] = step;
  }
}

enum Outcome { kRan = 0, kFileRefused = 1, kInputRefused = 2 };

Outcome run(octet_model* model, Random& random) {
  std::vector<Memory> inputs(octet_input_count(model)), outputs(octet_output_count(model));
  std::vector<octet_tensor> given, results(outputs.size());
  // Inputs of one batch have one size, which sizes that are drawn apart seldom are.
  const int64_t common = random() % 2 ? 1 + static_cast<int64_t>(below(random, 24)) : 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    describe(model, static_cast<int32_t>(i), common, random, inputs[i].tensor);
    if (!inputs[i].allocate()) return kInputRefused;
    if (inputs[i].tensor.dtype == OCTET_FLOAT32 && inputs[i].tensor.rank > 0 && inputs[i].tensor.sizes[0] > 0)
      static_cast<float*>(inputs[i].tensor.data)[0] = static_cast<float>(static_cast<int64_t>(random() % 2001) - 1000) / 100;
    if (inputs[i].tensor.dtype == OCTET_INT64 && inputs[i].tensor.rank > 0 && inputs[i].tensor.sizes[0] > 0)
      static_cast<int64_t*>(inputs[i].tensor.data)[0] = static_cast<int64_t>(random() % 24) - 1;
    given.push_back(inputs[i].tensor);
  }
  if (octet_plan(model, given.data(), results.data()) != OCTET_OK) return kInputRefused;
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i].tensor = results[i];
    if (!outputs[i].allocate()) return kInputRefused;
    results[i] = outputs[i].tensor;
  }
  return octet_run(model, given.data(), results.data()) == OCTET_OK ? kRan : kInputRefused;
}

Outcome run_case(const std::string& bytes, Random& random) {
  // A copy that is exactly as large, for the same reason.
  uint8_t* const memory = static_cast<uint8_t*>(std::malloc(bytes.size() ? bytes.size() : 1));
  std::memcpy(memory, bytes.data(), bytes.size());
  octet_model* const model = octet_open_memory(memory, bytes.size());
  std::free(memory);
  if (!model) return kFileRefused;
  octet_set_threads(model, random() % 8 ? 1 : 2);
  Outcome outcome = kInputRefused;
  for (int left = 3; left > 0; --left) outcome = std::min(outcome, run(model, random));
  octet_close(model);
  return outcome;
}

std::string read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Whether a file as it is opens, and runs for some inputs: what is altered of another one tries nothing.
bool runs_whole(const char* path, const std::string& bytes) {
  octet_model* const model = octet_open_memory(bytes.data(), bytes.size());
  Random random(1);
  bool ran = false;
  for (int left = kTries; model && left > 0 && !ran; --left) ran = run(model, random) == kRan;
  if (!ran) std::fprintf(stderr, "fuzz: %s, unaltered, does not %s: %s\n", path, model ? "run for any of the inputs that are tried" : "open", octet_error());
  octet_close(model);
  return ran;
}

// Ends this process by SIGPROF after so much CPU time, and by SIGALRM after so much time; 0 for never.
void limit_time(int computing, int waiting) {
  const itimerval after = {{0, 0}, {computing, 0}};
  setitimer(ITIMER_PROF, &after, nullptr);
  alarm(waiting);
}

// What a process has done of its cases, in memory that outlives it.
struct Progress {
  uint64_t next;  // the case that is running, or the first that was not begun
  uint64_t outcomes[3], stopped, failures;
};

// The status of a process of its own that does this: it may use threads, which none that is begun after it would have.
template <class Work>
int status_of(Work work) {
  const pid_t child = fork();
  if (child == 0) _exit(work() ? 0 : 1);
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) < 0) {
    std::perror("fuzz: no process");
    std::exit(2);
  }
  return status;
}

struct Campaign {
  uint64_t cases, seed;
  const char* folder;
  std::vector<std::string> files;
  Progress* progress;

  std::string bytes_of(uint64_t place, Random& random) const { return altered(files[place % files.size()], random); }

  // Some cases, in this process.
  bool run_cases() const {
    for (uint64_t left = kCasesOfProcess; left > 0 && progress->next < cases; --left, ++progress->next) {
      Random random(seed + progress->next);
      const std::string bytes = bytes_of(progress->next, random);
      limit_time(kMostSeconds, kMostWaiting);
      ++progress->outcomes[run_case(bytes, random)];
    }
    limit_time(0, 0);
    return true;
  }

  // Notes the case that ended a process.
  void note_end(int status) const {
    const uint64_t place = progress->next++;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGPROF) {
      ++progress->stopped;
      return;
    }
    ++progress->failures;
    Random random(seed + place);
    const std::string bytes = bytes_of(place, random), path = std::string(folder) + "/case" + std::to_string(seed + place) + ".q8";
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    std::fprintf(stderr, "fuzz: %s ended the process\n", path.c_str());
  }

  void run() const {
    while (progress->next < cases) {
      if (const int status = status_of([&] { return run_cases(); }))
        note_end(status);
      else
        std::fprintf(stderr, "fuzz: %llu of %llu files\n", static_cast<unsigned long long>(progress->next), static_cast<unsigned long long>(cases));
    }
  }
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 5) {
    std::fprintf(stderr, "usage: fuzz COUNT SEED FOLDER FILE...\n");
    return 2;
  }
  Campaign campaign{std::strtoull(arguments[1], nullptr, 10), std::strtoull(arguments[2], nullptr, 10), arguments[3], {}, nullptr};
  bool all_run = true;
  for (int i = 4; i < count; ++i) {
    campaign.files.push_back(read(arguments[i]));
    all_run &= status_of([&] { return runs_whole(arguments[i], campaign.files.back()); }) == 0;
  }
  if (!all_run) return 2;
  void* const shared = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) {
    std::perror("fuzz: no memory");
    return 2;
  }
  campaign.progress = static_cast<Progress*>(shared);  // zeros
  campaign.run();
  const Progress& done = *campaign.progress;
  std::printf("%llu altered files: %llu refused when opened, %llu when run, %llu ran, %llu stopped after %d s of CPU time, %llu failures\n",
              static_cast<unsigned long long>(campaign.cases), static_cast<unsigned long long>(done.outcomes[kFileRefused]),
              static_cast<unsigned long long>(done.outcomes[kInputRefused]), static_cast<unsigned long long>(done.outcomes[kRan]),
              static_cast<unsigned long long>(done.stopped), kMostSeconds, static_cast<unsigned long long>(done.failures));
  return done.failures ? 1 : 0;
}

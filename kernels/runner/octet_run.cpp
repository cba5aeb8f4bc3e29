// octet-run: runs a model of `quant.save(model, path, runner=True)` on arrays in .npy files, over the C API alone.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "npy.h"
#include "octet.h"

namespace {

using namespace npy;
using Clock = std::chrono::steady_clock;

constexpr const char* kUsage =
    "usage: octet-run MODEL --input FILE.npy ... [--output FILE.npy ...] [--repeat N] [--threads N]\n"
    "       octet-run MODEL --describe\n"
    "Inputs and outputs in the model's order; NAME=FILE.npy is one by its name.\n";

struct Options {
  std::string model;
  std::vector<std::string> inputs, outputs;
  int repeat = 0, threads = 0;
  bool describe = false;
};

struct Usage : std::runtime_error {
  using std::runtime_error::runtime_error;
};

int number(const std::string& option, const std::string& word, int least) {
  int value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size() || value < least)
    throw Usage(option + " is '" + word + "', expected a number" + (least ? " from " + std::to_string(least) : ""));
  return value;
}

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    const auto value = [&] {
      if (++i == count) throw Usage(word + " needs a value");
      return std::string(arguments[i]);
    };
    if (word == "--input") options.inputs.push_back(value());
    else if (word == "--output") options.outputs.push_back(value());
    else if (word == "--repeat") options.repeat = number(word, value(), 0);
    else if (word == "--threads") options.threads = number(word, value(), 1);
    else if (word == "--describe") options.describe = true;
    else if (word.starts_with("--") || !options.model.empty()) throw Usage("unknown argument '" + word + "'");
    else options.model = word;
  }
  if (options.model.empty()) throw Usage("no model");
  return options;
}

void expect(bool holds) {
  if (!holds) throw std::runtime_error(octet_error());
}

struct Model {
  octet_model* const model;
  explicit Model(const std::string& path) : model(octet_open(path.c_str())) { expect(model); }
  ~Model() { octet_close(model); }

  octet_value input(int32_t index) const {
    octet_value value;
    expect(octet_describe_input(model, index, &value) == OCTET_OK);
    return value;
  }
  octet_value output(int32_t index) const {
    octet_value value;
    expect(octet_describe_output(model, index, &value) == OCTET_OK);
    return value;
  }
};

void print_value(const char* kind, const octet_value& value) {
  static constexpr const char* kNames[] = {"float32", "uint8", "bool", "int64"};
  std::printf("%s %s %s", kind, value.name, kNames[value.dtype]);
  if (value.rank < 0) {
    std::printf(" of any rank\n");
    return;
  }
  std::printf(" (");
  for (int d = 0; d < value.rank; ++d) {
    if (d) std::printf(", ");
    if (value.sizes[d] < 0) std::printf("any");
    else std::printf("%lld", static_cast<long long>(value.sizes[d]));
  }
  std::printf(")\n");
}

void describe(const Model& model) {
  for (int32_t i = 0; i < octet_input_count(model.model); ++i) print_value("input", model.input(i));
  for (int32_t i = 0; i < octet_output_count(model.model); ++i) print_value("output", model.output(i));
  std::printf("instruction set %s\n", octet_instruction_set());
}

std::vector<std::string> input_names(const Model& model) {
  std::vector<std::string> names;
  for (int32_t i = 0; i < octet_input_count(model.model); ++i) names.emplace_back(model.input(i).name);
  return names;
}

std::vector<std::string> output_names(const Model& model) {
  std::vector<std::string> names;
  for (int32_t i = 0; i < octet_output_count(model.model); ++i) names.emplace_back(model.output(i).name);
  return names;
}

// The place that a word of --input or --output is for; what is left of the word is its file.
size_t place_of(const std::vector<std::string>& names, std::string& word, size_t order) {
  for (size_t i = 0; i < names.size(); ++i)
    if (const std::string begin = names[i] + "="; word.starts_with(begin)) {
      word.erase(0, begin.size());
      return i;
    }
  return order;
}

struct Written {
  size_t place;
  std::string path;
};

// A word such as y=z.npy is no file by that name, but ./y=z.npy is.
std::vector<Written> outputs_asked(const Model& model, const Options& options) {
  const std::vector<std::string> names = output_names(model);
  std::vector<Written> asked;
  for (size_t i = 0; i < options.outputs.size(); ++i) {
    std::string path = options.outputs[i];
    const size_t place = place_of(names, path, i);
    if (place >= names.size()) throw Usage("the model has " + std::to_string(names.size()) + " outputs");
    const size_t sign = path.find('=');
    if (path == options.outputs[i] && sign != std::string::npos && path.find_first_of("/\\") > sign) {
      std::string known;
      for (const std::string& name : names) known += (known.empty() ? "'" : ", '") + name + "'";
      throw Usage("--output " + path + ": the model has no output '" + path.substr(0, sign) + "'; its outputs are " + known);
    }
    asked.push_back({place, path});
  }
  return asked;
}

std::vector<Array> read_inputs(const Model& model, const Options& options) {
  const std::vector<std::string> names = input_names(model);
  const size_t count = names.size();
  std::vector<Array> inputs(count);
  for (size_t i = 0; i < options.inputs.size(); ++i) {
    std::string path = options.inputs[i];
    const size_t place = place_of(names, path, i);
    if (place >= count) throw Usage("the model has " + std::to_string(count) + " inputs");
    inputs[place] = read_npy(path);
  }
  for (size_t i = 0; i < count; ++i)
    if (!inputs[i].tensor.data) throw Usage("no --input for '" + names[i] + "'");
  return inputs;
}

double milliseconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

void repeat(const Model& model, const std::vector<octet_tensor>& inputs, std::vector<octet_tensor>& outputs, int times) {
  std::vector<double> taken;
  for (int i = 0; i < times; ++i) {
    const Clock::time_point begin = Clock::now();
    expect(octet_run(model.model, inputs.data(), outputs.data()) == OCTET_OK);
    taken.push_back(milliseconds(begin, Clock::now()));
  }
  std::sort(taken.begin(), taken.end());
  std::printf("%d runs: median %.3f ms, least %.3f ms\n", times, taken[taken.size() / 2], taken.front());
}

void run(const Options& options, Clock::time_point start) {
  const Model model(options.model);
  expect(octet_set_threads(model.model, options.threads) == OCTET_OK);
  if (options.describe) return describe(model);
  const Clock::time_point opened = Clock::now();
  const std::vector<Array> arrays = read_inputs(model, options);
  std::vector<octet_tensor> inputs;
  for (const Array& array : arrays) inputs.push_back(array.tensor);
  const size_t count = octet_output_count(model.model);
  const std::vector<Written> asked = outputs_asked(model, options);
  std::vector<octet_tensor> outputs(count);
  std::vector<std::vector<uint8_t>> memory(count);
  const Clock::time_point read = Clock::now();
  expect(octet_plan(model.model, inputs.data(), outputs.data()) == OCTET_OK);
  for (size_t i = 0; i < count; ++i) allocate(outputs[i], memory[i]);
  const Clock::time_point planned = Clock::now();
  expect(octet_run(model.model, inputs.data(), outputs.data()) == OCTET_OK);
  const Clock::time_point first = Clock::now();
  for (const Written& one : asked) write_npy(one.path, outputs[one.place]);
  std::printf("open %.2f ms, plan %.2f ms, first run %.2f ms; first result %.2f ms after the start\n", milliseconds(start, opened),
              milliseconds(read, planned), milliseconds(planned, first), milliseconds(start, first));
  if (options.repeat) repeat(model, inputs, outputs, options.repeat);
}

int no_memory() {
  std::fprintf(stderr, "octet-run: out of memory for the inputs and outputs\n");
  return 1;
}

}  // namespace

int main(int count, char** arguments) {
  const Clock::time_point start = Clock::now();
  try {
    run(parse(count, arguments), start);
  } catch (const Usage& error) {
    std::fprintf(stderr, "octet-run: %s\n%s", error.what(), kUsage);
    return 2;
  } catch (const std::bad_alloc&) {
    return no_memory();
  } catch (const std::length_error&) {  // what the standard library says of a size beyond all memory
    return no_memory();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "octet-run: %s\n", error.what());
    return 1;
  }
  return 0;
}

// Runs plans with the core alone: no torch and no Python. `run_plan FILE OUT` reads a plan, its constants and its inputs, and
// writes the bytes of its outputs one after the other. FILE is numbers of 8 bytes and what they count: the text; the
// constants, each as dtype, sizes and bytes; how many runs; and in each the inputs, as whether real, sizes, strides and bytes.
// `run_plan --passes TEXT` prints what the passes wrote into the operations of a text.
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "core/plan/own_weights.h"
#include "core/plan/passes.h"
#include "core/plan/prepared.h"

namespace {

class Reader {
 public:
  explicit Reader(const char* path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
  }
  int64_t number() {
    int64_t value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::string bytes() {
    const int64_t count = number();
    return std::string(take(count), count);
  }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> values(number());
    for (int64_t& value : values) value = number();
    return values;
  }

 private:
  const char* take(int64_t count) {
    if (count < 0 || at_ + count > static_cast<int64_t>(bytes_.size())) throw std::runtime_error("the file is too short");
    at_ += count;
    return bytes_.data() + at_ - count;
  }

  std::string bytes_;
  int64_t at_ = 0;
};

void run(const char* from, const char* to) {
  Reader in(from);
  std::ofstream out(to, std::ios::binary);
  const std::string text = in.bytes();
  std::vector<octet::PlanConstant> constants;
  std::vector<std::string> kept(in.number());
  for (std::string& bytes : kept) {
    const std::string dtype = in.bytes();
    const std::vector<int64_t> sizes = in.numbers();
    bytes = in.bytes();
    constants.push_back({bytes.data(), dtype, sizes});
  }
  const octet::PreparedProgram program(text, constants);
  octet::OwnWeights weights(constants);
  for (int64_t runs = in.number(); runs > 0; --runs) {
    std::vector<octet::PlanTensor> inputs;
    std::vector<std::string> values, results;
    for (int64_t left = in.number(); left > 0; --left) {
      const bool real = in.number();
      const std::vector<int64_t> sizes = in.numbers();
      inputs.push_back({sizes, in.numbers(), real});
      values.push_back(in.bytes());
    }
    const auto plan = program.build(inputs, weights);
    for (const octet::PlanTensor& output : plan->outputs()) {
      int64_t count = output.real ? 4 : 1;
      for (const int64_t size : output.sizes) count *= size;
      results.emplace_back(count, '\0');
    }
    std::vector<const void*> sources;
    std::vector<void*> results_at;
    for (const std::string& value : values) sources.push_back(value.data());
    for (std::string& result : results) results_at.push_back(result.data());
    plan->run(sources.data(), results_at.data());
    for (const std::string& result : results) out.write(result.data(), static_cast<std::streamsize>(result.size()));
  }
}

// Fields by the place of their operation, those alone that a pass has set.
void print_passes(const char* path) {
  std::ifstream file(path, std::ios::binary);
  octet::Program program = octet::parse_program(std::string(std::istreambuf_iterator<char>(file), {}));
  octet::run_passes(program);
  for (size_t place = 0; place < program.operations.size(); ++place) {
    const octet::Operation& operation = program.operations[place];
    const auto print = [&](const char* field, octet::Place to) {
      if (to != octet::kNowhere) std::cout << place << " " << field << " " << to << "\n";
    };
    if (const auto* conv = operation.as<octet::op::Conv>()) print("sum", conv->sum);
    if (const auto* add = operation.as<octet::op::AddReal>()) print("norm", add->norm);
    if (const auto* norm = operation.as<octet::op::LayerNorm>()) print("rounding", norm->rounding);
    if (const auto* quantize = operation.as<octet::op::Quantize>(); quantize && quantize->for_linear)
      std::cout << place << " for_linear\n";
    if (const auto* dequantize = operation.as<octet::op::Dequantize>(); dequantize && dequantize->given_out)
      std::cout << place << " given_out\n";
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::cerr << "usage: run_plan FILE OUT, or run_plan --passes TEXT\n";
    return 2;
  }
  try {
    if (std::string(arguments[1]) == "--passes")
      print_passes(arguments[2]);
    else
      run(arguments[1], arguments[2]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}

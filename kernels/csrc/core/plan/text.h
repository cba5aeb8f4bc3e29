// The text of a plan: one operation a line, as kernels/reference_plan.py defines and interprets it.
//
//     octet-plan 1
//     inputs %0
//     %1 = quantize x=%0 scale=0.02 zero_point=128
//     %3 = conv_u8s8_u8 q_x=%1 zero_point=128 q_weight=$0 q_bias=$1 stride=1,1 ...
//     outputs %3
//
// %n is a register, $n a constant tensor, - nothing; lists are separated by commas.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace octet {

class PlanLine {
 public:
  int64_t out = -1;
  std::string op, text;
  std::map<std::string, std::string, std::less<>> fields;

  bool has(std::string_view name) const;  // it is there and not "-"
  const std::string& word(std::string_view name) const;
  int64_t integer(std::string_view name) const;
  double number(std::string_view name) const;
  bool flag(std::string_view name) const;
  int64_t reg(std::string_view name) const;
  // Index of a constant, -1 for "-".
  int64_t constant(std::string_view name) const;
  std::vector<int64_t> integers(std::string_view name) const;
  std::vector<double> numbers(std::string_view name) const;
  std::vector<std::string> words(std::string_view name) const;

  [[noreturn]] void fail(const std::string& why) const;  // std::invalid_argument that quotes the line
};

struct PlanText {
  std::vector<int64_t> inputs, outputs;
  std::vector<PlanLine> lines;
};

// Raises std::invalid_argument where the text is not a plan. Numbers are parsed independently of the locale.
PlanText parse_plan(std::string_view text);

int64_t parse_register(const PlanLine& line, std::string_view word);
int64_t parse_integer(const PlanLine& line, std::string_view word);
double parse_number(const PlanLine& line, std::string_view word);  // inf or -inf too, but not NaN

// A finite number in decimal digits, whatever the locale; nothing where `word` is none.
std::optional<double> read_real(std::string_view word);

// The parts between separators; an empty text has none, and an empty last part is none.
std::vector<std::string_view> split(std::string_view text, char separator);

}  // namespace octet

#include "plan_text.h"

#include <charconv>
#include <cstdlib>
#include <stdexcept>

namespace octet {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = text.find(separator);
    if (end != 0) parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return parts;
}

int64_t to_integer(const PlanLine& line, std::string_view word) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) line.fail("'" + std::string(word) + "' is no integer");
  return value;
}

double to_number(const PlanLine& line, std::string_view word) {
  const std::string copy(word);
  char* end = nullptr;
  const double value = std::strtod(copy.c_str(), &end);
  if (copy.empty() || *end) line.fail("'" + copy + "' is no number");
  return value;
}

int64_t after_mark(const PlanLine& line, std::string_view word, char mark) {
  if (word.size() < 2 || word[0] != mark) line.fail("expected " + std::string(1, mark) + "number, got '" + std::string(word) + "'");
  return to_integer(line, word.substr(1));
}

}  // namespace

void PlanLine::fail(const std::string& why) const { throw std::invalid_argument("plan line '" + text + "': " + why); }

bool PlanLine::has(std::string_view name) const {
  const auto found = fields.find(name);
  return found != fields.end() && found->second != "-";
}

const std::string& PlanLine::word(std::string_view name) const {
  const auto found = fields.find(name);
  if (found == fields.end()) fail("has no " + std::string(name));
  return found->second;
}

int64_t PlanLine::integer(std::string_view name) const { return to_integer(*this, word(name)); }
double PlanLine::number(std::string_view name) const { return to_number(*this, word(name)); }
bool PlanLine::flag(std::string_view name) const { return has(name) && word(name) == "True"; }
int64_t PlanLine::reg(std::string_view name) const { return parse_register(*this, word(name)); }
int64_t PlanLine::constant(std::string_view name) const { return has(name) ? after_mark(*this, word(name), '$') : -1; }

std::vector<std::string> PlanLine::words(std::string_view name) const {
  std::vector<std::string> out;
  for (const std::string_view part : split(word(name), ',')) out.emplace_back(part);
  return out;
}

std::vector<int64_t> PlanLine::integers(std::string_view name) const {
  std::vector<int64_t> out;
  for (const std::string& part : words(name)) out.push_back(to_integer(*this, part));
  return out;
}

std::vector<double> PlanLine::numbers(std::string_view name) const {
  std::vector<double> out;
  for (const std::string& part : words(name)) out.push_back(to_number(*this, part));
  return out;
}

int64_t parse_register(const PlanLine& line, std::string_view word) { return after_mark(line, word, '%'); }

PlanText parse_plan(std::string_view text) {
  PlanText plan;
  bool first = true;
  for (const std::string_view row : split(text, '\n')) {
    PlanLine line;
    line.text = row;
    if (first) {
      if (row != "octet-plan 1") line.fail("expected 'octet-plan 1': it was written by another version");
      first = false;
      continue;
    }
    const std::vector<std::string_view> words = split(row, ' ');
    if (words[0] == "inputs" || words[0] == "outputs") {
      std::vector<int64_t>& registers = words[0] == "inputs" ? plan.inputs : plan.outputs;
      for (size_t i = 1; i < words.size(); ++i) registers.push_back(parse_register(line, words[i]));
      continue;
    }
    if (words.size() < 3 || words[1] != "=") line.fail("expected '%register = operation name=value ...'");
    line.out = parse_register(line, words[0]);
    line.op = words[2];
    for (size_t i = 3; i < words.size(); ++i) {
      const size_t middle = words[i].find('=');
      if (middle == std::string_view::npos) line.fail("expected name=value, got '" + std::string(words[i]) + "'");
      line.fields.emplace(words[i].substr(0, middle), words[i].substr(middle + 1));
    }
    plan.lines.push_back(std::move(line));
  }
  return plan;
}

}  // namespace octet

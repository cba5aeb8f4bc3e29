#include "core/plan/text.h"

#include <locale.h>
#include <stdlib.h>
#if defined(__APPLE__)
#include <xlocale.h>
#endif

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace octet {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return parts;
}

int64_t parse_integer(const PlanLine& line, std::string_view word) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) line.fail("'" + std::string(word) + "' is no integer");
  return value;
}

std::optional<double> read_real(std::string_view word) {
  const auto plain = [](char sign) {
    return (sign >= '0' && sign <= '9') || sign == '.' || sign == '-' || sign == '+' || sign == 'e' || sign == 'E';
  };
  if (word.empty() || word[0] == '+' || !std::all_of(word.begin(), word.end(), plain)) return {};
  // Not strtod, which reads decimal commas where the process has such a locale; nor std::from_chars, which libc++ has for
  // floating-point numbers from version 20 on, and so neither Emscripten nor Android's NDK before.
  static const locale_t in_c = newlocale(LC_ALL_MASK, "C", nullptr);
  const std::string text(word);
  char* end = nullptr;
  const double value = strtod_l(text.c_str(), &end, in_c);
  if (end != text.c_str() + text.size() || !std::isfinite(value)) return {};
  return value;
}

double parse_number(const PlanLine& line, std::string_view word) {
  if (word == "inf") return std::numeric_limits<double>::infinity();
  if (word == "-inf") return -std::numeric_limits<double>::infinity();
  const std::optional<double> value = read_real(word);
  if (!value) line.fail("'" + std::string(word) + "' is no number");
  return *value;
}

namespace {

int64_t after_mark(const PlanLine& line, std::string_view word, char mark) {
  if (word.size() < 2 || word[0] != mark) line.fail("expected " + std::string(1, mark) + "number, got '" + std::string(word) + "'");
  const int64_t index = parse_integer(line, word.substr(1));
  if (word[1] == '-') line.fail("'" + std::string(word) + "' is negative");
  return index;
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

int64_t PlanLine::integer(std::string_view name) const { return parse_integer(*this, word(name)); }
double PlanLine::number(std::string_view name) const { return parse_number(*this, word(name)); }
bool PlanLine::flag(std::string_view name) const { return has(name) && word(name) == "True"; }
int64_t PlanLine::reg(std::string_view name) const { return parse_register(*this, word(name)); }
int64_t PlanLine::constant(std::string_view name) const {
  if (!has(name)) return -1;
  const int64_t index = after_mark(*this, word(name), '$');
  if (index > std::numeric_limits<int32_t>::max()) fail("there is no constant " + word(name));
  return index;
}

std::vector<std::string> PlanLine::words(std::string_view name) const {
  std::vector<std::string> out;
  for (const std::string_view part : split(word(name), ',')) {
    if (part.empty()) fail(std::string(name) + " has an empty part");
    out.emplace_back(part);
  }
  return out;
}

std::vector<int64_t> PlanLine::integers(std::string_view name) const {
  std::vector<int64_t> out;
  for (const std::string& part : words(name)) out.push_back(parse_integer(*this, part));
  return out;
}

std::vector<double> PlanLine::numbers(std::string_view name) const {
  std::vector<double> out;
  for (const std::string& part : words(name)) out.push_back(parse_number(*this, part));
  return out;
}

int64_t parse_register(const PlanLine& line, std::string_view word) { return after_mark(line, word, '%'); }

PlanText parse_plan(std::string_view text) {
  PlanText plan;
  const std::vector<std::string_view> rows = split(text, '\n');
  for (size_t row = 0; row < rows.size(); ++row) {
    PlanLine line;
    line.text = rows[row];
    if (row == 0) {
      if (rows[0] != "octet-plan 1") line.fail("expected 'octet-plan 1': it was written by another version");
      continue;
    }
    const std::vector<std::string_view> words = split(rows[row], ' ');
    if (words.empty() || line.text.ends_with(' ') || std::find(words.begin(), words.end(), "") != words.end())
      line.fail("expected words with one space between them");
    if (row == 1 || row + 1 == rows.size()) {
      const bool first = row == 1;
      if (words[0] != (first ? "inputs" : "outputs")) line.fail(first ? "expected 'inputs ...'" : "expected 'outputs ...'");
      for (size_t i = 1; i < words.size(); ++i) (first ? plan.inputs : plan.outputs).push_back(parse_register(line, words[i]));
      continue;
    }
    if (words.size() < 3 || words[1] != "=") line.fail("expected '%register = operation name=value ...'");
    line.out = parse_register(line, words[0]);
    line.op = words[2];
    for (size_t i = 3; i < words.size(); ++i) {
      const size_t middle = words[i].find('=');
      if (middle == std::string_view::npos || middle + 1 == words[i].size())
        line.fail("expected name=value, got '" + std::string(words[i]) + "'");
      const bool fresh = line.fields.emplace(words[i].substr(0, middle), words[i].substr(middle + 1)).second;
      if (!fresh) line.fail("has " + std::string(words[i].substr(0, middle)) + " twice");
    }
    plan.lines.push_back(std::move(line));
  }
  if (rows.size() < 3 || text.ends_with('\n')) throw std::invalid_argument("plan: expected 'octet-plan 1', inputs, operations and outputs");
  return plan;
}

}  // namespace octet

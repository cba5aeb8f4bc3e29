#include "core/plan/check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <stdexcept>

#include "core/plan/sizes.h"
#include "core/rnn/rnn.h"
#include "core/rows/elementwise.h"

namespace octet {
namespace {

using Table = std::map<std::string, std::vector<Setting>, std::less<>>;

Setting setting_of(std::string_view word) {
  Setting setting;
  const size_t colon = word.find(':');
  std::string_view name = word.substr(0, colon), kind = word.substr(colon + 1);
  if (name.ends_with('?')) setting.optional = true, name.remove_suffix(1);
  if (kind.ends_with("|-")) setting.nothing = true, kind.remove_suffix(2);
  setting.name = name, setting.kind = kind;
  return setting;
}

void add_row(std::string_view row, Table* rows) {
  const std::vector<std::string_view> words = split(row, ' ');
  std::vector<Setting>& settings = (*rows)[std::string(words[0])];
  for (size_t i = 1; i < words.size(); ++i) settings.push_back(setting_of(words[i]));
}

const Table& table() {
  static const Table known = [] {
    static constexpr std::string_view text =
#include "core/plan/settings.inc"
        ;
    Table rows;
    for (const std::string_view row : split(text, '\n'))
      if (!row.empty()) add_row(row, &rows);
    for (const BinaryKind* kind = element_kernels().binary; kind->line; ++kind) add_row(kind->line, &rows);
    return rows;
  }();
  return known;
}

constexpr int64_t kMost = 1 << 24;  // of a window, a width, a factor: beyond every image, and no product of them overflows

void within(const PlanLine& line, const std::string& name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    line.fail(name + " is " + std::to_string(value) + ", expected " + std::to_string(low) + " to " + std::to_string(high));
}

void positive(const PlanLine& line, const std::string& name, std::string_view word, double most) {
  const float value = static_cast<float>(parse_number(line, word));
  if (!(value > 0 && value <= most)) line.fail(name + " is " + std::string(word) + ", expected a positive number");
}

using Check = void (*)(const PlanLine&, const std::string& name, std::string_view word);

// One value of each kind; lists are made of these.
const std::map<std::string, Check, std::less<>>& kinds();

const std::map<std::string, Check, std::less<>>& kinds() {
  static const std::map<std::string, Check, std::less<>> known = {
      {"byte", [](const PlanLine& line, const std::string& name, std::string_view word) {
         within(line, name, parse_integer(line, word), 0, 255);
       }},
      {"count", [](const PlanLine& line, const std::string& name, std::string_view word) {
         within(line, name, parse_integer(line, word), 1, kMost);
       }},
      {"pad", [](const PlanLine& line, const std::string& name, std::string_view word) {
         within(line, name, parse_integer(line, word), 0, kMost);
       }},
      {"width", [](const PlanLine& line, const std::string& name, std::string_view word) {
         within(line, name, parse_integer(line, word), -kMost, kMost);
       }},
      {"integer", [](const PlanLine& line, const std::string&, std::string_view word) { parse_integer(line, word); }},
      {"output", [](const PlanLine& line, const std::string& name, std::string_view word) {
         if (word != "-") within(line, name, parse_integer(line, word), 1, kMost);
       }},
      {"size", [](const PlanLine& line, const std::string& name, std::string_view word) {
         const SizeParts parts = parse_size(line, word);
         if (parts.front().kind == SizePart::Kind::kNumber && parts.size() == 1)
           within(line, name, parts.front().number, -1, int64_t{1} << 40);
       }},
      {"extent", [](const PlanLine& line, const std::string& name, std::string_view word) {
         const SizeParts parts = parse_size(line, word);
         if (parts.front().kind == SizePart::Kind::kNumber && parts.size() == 1) within(line, name, parts.front().number, 1, kMost);
       }},
      {"place", [](const PlanLine& line, const std::string&, std::string_view word) { parse_size(line, word); }},
      {"real", [](const PlanLine& line, const std::string& name, std::string_view word) {
         if (!std::isfinite(static_cast<float>(parse_number(line, word))))
           line.fail(name + " is " + std::string(word) + ", expected a finite number");
       }},
      {"number", [](const PlanLine& line, const std::string&, std::string_view word) { parse_number(line, word); }},
      {"positive", [](const PlanLine& line, const std::string& name, std::string_view word) {
         positive(line, name, word, std::numeric_limits<float>::max());
       }},
      {"factor", [](const PlanLine& line, const std::string& name, std::string_view word) { positive(line, name, word, kMost); }},
      {"flag", [](const PlanLine& line, const std::string& name, std::string_view word) {
         if (word != "True" && word != "False") line.fail(name + " is " + std::string(word) + ", expected True or False");
       }},
      {"u8", [](const PlanLine& line, const std::string&, std::string_view word) { parse_register(line, word); }},
      {"f32", [](const PlanLine& line, const std::string&, std::string_view word) { parse_register(line, word); }},
      {"i64", [](const PlanLine& line, const std::string&, std::string_view word) { parse_register(line, word); }},
      {"any", [](const PlanLine& line, const std::string&, std::string_view word) { parse_register(line, word); }},
      {"cell", [](const PlanLine& line, const std::string& name, std::string_view word) {
         if (!find_cell(word)) line.fail(name + " is " + std::string(word) + ", expected a kind of recurrent layer");
       }},
  };
  return known;
}

void check_setting(const PlanLine& line, const Setting& setting, const std::string& word) {
  const std::string_view kind = setting.kind;
  if (setting.nothing && word == "-") return;
  if (kind.starts_with('$')) {
    line.constant(setting.name);
    if (word == "-") line.fail(setting.name + " is nothing, expected a constant");
    return;
  }
  if (const auto one = kinds().find(kind); one != kinds().end()) return one->second(line, setting.name, word);
  const bool list = word.find(',') != std::string::npos;
  if (kind.find(',') != std::string_view::npos) {  // one of some words
    const std::vector<std::string_view> words = split(kind, ',');
    if (std::find(words.begin(), words.end(), word) == words.end())
      line.fail(setting.name + " is " + word + ", expected one of " + std::string(kind));
    return;
  }
  // Several: `counts`, or one for all as well: `count/s`.
  const bool either = kind.ends_with("/s");
  const auto of = kinds().find(kind.substr(0, kind.size() - (either ? 2 : 1)));
  if (of == kinds().end()) throw std::logic_error("settings.inc has an unknown kind " + setting.kind);
  if (!list && !either) line.fail(setting.name + " is " + word + ", expected a list (a list of one ends with a comma)");
  const std::vector<std::string> words = line.words(setting.name);
  if (words.empty()) line.fail(setting.name + " is empty");
  for (const std::string& one : words) of->second(line, setting.name, one);
}

// A concatenation copies, or brings every input to its own range.
void check_rescaling(const PlanLine& line) {
  const bool rescales = line.has("multipliers");
  if (line.has("zero_points") != rescales || line.has("output_zero_point") != rescales)
    line.fail("expected zero_points, multipliers and output_zero_point, or none of them");
  if (!rescales) return;
  const size_t inputs = line.words("tensors").size();
  for (const char* name : {"zero_points", "multipliers"})
    if (const size_t given = line.words(name).size(); given != inputs)
      line.fail(std::string(name) + " has " + std::to_string(given) + " values, expected one for each of " + std::to_string(inputs) +
                " inputs");
}

// What settings have to do with each other.
void check_together(const PlanLine& line) {
  if (line.has("quant_min") && line.integer("quant_min") > line.integer("quant_max"))
    line.fail("quant_min is above quant_max");
  if (line.op == "attention" && line.flag("causal") && line.has("mask")) line.fail("is causal and has a mask");
  if (line.op == "cat") check_rescaling(line);
  if (line.op == "interpolate") {
    if (line.has("size") == line.has("scale_factor")) line.fail("expected one of size and scale_factor");
    if (line.has("size") && line.flag("recompute_scale_factor")) line.fail("has a size and no scale_factor to recompute");
    if (line.flag("align_corners") && !line.word("mode").ends_with("linear")) line.fail("aligns corners in a mode that has none");
  }
}

void check_line(const PlanLine& line) {
  const auto found = table().find(line.op);
  if (found == table().end()) line.fail("no such operation");
  const std::vector<Setting>& settings = found->second;
  for (const auto& field : line.fields)
    if (std::none_of(settings.begin(), settings.end(), [&](const Setting& one) { return one.name == field.first; }))
      line.fail(line.op + " has no setting " + field.first);
  for (const Setting& setting : settings) {
    const auto given = line.fields.find(setting.name);
    if (given != line.fields.end())
      check_setting(line, setting, given->second);
    else if (!setting.optional)
      line.fail("has no " + setting.name);
  }
  check_together(line);
}

// The registers that a line names, sizes of them among that.
std::vector<int64_t> registers_of(const PlanLine& line) {
  std::vector<int64_t> found;
  for (const auto& [name, value] : line.fields)
    for (size_t at = value.find('%'); at != std::string::npos; at = value.find('%', at + 1)) {
      const size_t end = value.find_first_not_of("0123456789", at + 1);
      found.push_back(parse_register(line, std::string_view(value).substr(at, end - at)));
    }
  return found;
}

}  // namespace

const std::vector<Setting>& settings_of(std::string_view operation) { return table().find(operation)->second; }

void check_plan(const PlanText& text) {
  std::set<int64_t> written;
  for (const int64_t reg : text.inputs)
    if (!written.insert(reg).second) throw std::invalid_argument("the plan has the input %" + std::to_string(reg) + " twice");
  for (const PlanLine& line : text.lines) {
    check_line(line);
    for (const int64_t reg : registers_of(line))
      if (!written.contains(reg)) line.fail("%" + std::to_string(reg) + " is not there yet");
    if (!written.insert(line.out).second) line.fail("%" + std::to_string(line.out) + " is there already");
  }
  for (const int64_t reg : text.outputs)
    if (!written.contains(reg))
      throw std::invalid_argument("the plan gives out %" + std::to_string(reg) + ", which it does not make");
}

}  // namespace octet

#include "core/plan/sizes.h"

#include <algorithm>
#include <iterator>

namespace octet {
namespace {

constexpr int64_t kMost = int64_t{1} << 40;  // in brackets; more than memory holds
constexpr int kDepth = 32;                   // of brackets in brackets

int64_t floor_division(int64_t left, int64_t right) {
  const int64_t quotient = left / right;
  return quotient - (left % right != 0 && (left < 0) != (right < 0));
}

struct SizeOperation {
  std::string_view name;
  int64_t (*apply)(int64_t left, int64_t right);
};

// Of two names where one begins with the other, the longer one stands first. Operands are at most kMost, or sizes of a tensor, so
// that only the product can leave int64; it is formed by itself.
constexpr SizeOperation kOperations[] = {
    {"+", [](int64_t left, int64_t right) { return left + right; }},
    {"-", [](int64_t left, int64_t right) { return left - right; }},
    {"*", nullptr},
    {"//", [](int64_t left, int64_t right) { return floor_division(left, right); }},
    {"mod", [](int64_t left, int64_t right) { return left - floor_division(left, right) * right; }},
    {"min", [](int64_t left, int64_t right) { return std::min(left, right); }},
    {"max", [](int64_t left, int64_t right) { return std::max(left, right); }},
    {"<=", [](int64_t left, int64_t right) { return int64_t{left <= right}; }},
    {"<", [](int64_t left, int64_t right) { return int64_t{left < right}; }},
    {"==", [](int64_t left, int64_t right) { return int64_t{left == right}; }},
    {"!=", [](int64_t left, int64_t right) { return int64_t{left != right}; }},
};

class SizeReader {
 public:
  SizeReader(const PlanLine& line, std::string_view word) : line_(line), word_(word), left_(word) {}

  SizeParts read() {
    operand(0);
    if (!left_.empty()) fail();
    return std::move(parts_);
  }

 private:
  [[noreturn]] void fail() const { line_.fail("'" + std::string(word_) + "' is no size"); }

  bool take(std::string_view text) {
    if (!left_.starts_with(text)) return false;
    left_.remove_prefix(text.size());
    return true;
  }

  int64_t integer() {
    size_t length = left_.starts_with('-') ? 1 : 0;
    while (length < left_.size() && left_[length] >= '0' && left_[length] <= '9') ++length;
    const int64_t value = parse_integer(line_, left_.substr(0, length));
    left_.remove_prefix(length);
    return value;
  }

  int64_t operation() {
    for (size_t place = 0; place < std::size(kOperations); ++place)
      if (take(kOperations[place].name)) return static_cast<int64_t>(place);
    fail();
  }

  void operand(int depth) {
    if (take("(")) {
      if (depth == kDepth) line_.fail("'" + std::string(word_) + "' has more than 32 brackets in each other");
      operand(depth + 1);
      const int64_t place = operation();
      operand(depth + 1);
      if (!take(")")) fail();
      parts_.push_back({SizePart::Kind::kOperation, place});
    } else if (take("%")) {
      const int64_t of = integer();
      if (of < 0 || !take(".")) fail();
      parts_.push_back({SizePart::Kind::kDimension, integer(), of});
    } else {
      const int64_t number = integer();
      if (depth && (number < -kMost || number > kMost)) fail();
      parts_.push_back({SizePart::Kind::kNumber, number});
    }
  }

  const PlanLine& line_;
  std::string_view word_, left_;
  SizeParts parts_;
};

}  // namespace

SizeParts parse_size(const PlanLine& line, std::string_view word) { return SizeReader(line, word).read(); }

const char* apply_to_sizes(int64_t operation, int64_t left, int64_t right, int64_t* result) {
  const SizeOperation& by = kOperations[operation];
  if ((by.name == "//" || by.name == "mod") && right == 0) return "a size is divided by zero";
  if (!by.apply) {
    if (__builtin_mul_overflow(left, right, result)) return "a size is beyond 2**40";
  } else {
    *result = by.apply(left, right);
  }
  return *result < -kMost || *result > kMost ? "a size is beyond 2**40" : nullptr;
}

}  // namespace octet

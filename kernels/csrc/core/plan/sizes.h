// Sizes in a plan's text: a number, the size of a value's dimension (%3.1), or arithmetic of sizes, each operation in brackets:
// `(%3.1//8)`. kernels/plan_sizes.py has the same grammar and bounds.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/plan/text.h"

namespace octet {

// One part of a size in postfix order.
struct SizePart {
  enum class Kind { kNumber, kDimension, kOperation };
  Kind kind;
  int64_t number;  // the number, the dimension, or the operation's place in the table
  int64_t of = 0;  // of a dimension: the register, which ir.cpp makes a value
};

using SizeParts = std::vector<SizePart>;

// Fails with the line where the word is no size. A number alone may be any; those in brackets are bounded, as all results are.
SizeParts parse_size(const PlanLine& line, std::string_view word);

// The number that it is. `dimension_of(of, dimension)` gives the size of a dimension, and fails where there is none; `fail` is
// called with a text where the arithmetic has no result.
template <class DimensionOf, class Fail>
int64_t size_of(const SizeParts& parts, DimensionOf dimension_of, Fail fail);

// The result of an operation, by its place in the table; null, or the reason why there is none.
const char* apply_to_sizes(int64_t operation, int64_t left, int64_t right, int64_t* result);

template <class DimensionOf, class Fail>
int64_t size_of(const SizeParts& parts, DimensionOf dimension_of, Fail fail) {
  std::vector<int64_t> stack;
  for (const SizePart& part : parts) {
    if (part.kind == SizePart::Kind::kNumber) {
      stack.push_back(part.number);
    } else if (part.kind == SizePart::Kind::kDimension) {
      stack.push_back(dimension_of(part.of, part.number));
    } else {
      const int64_t right = stack.back();
      stack.pop_back();
      if (const char* const why = apply_to_sizes(part.number, stack.back(), right, &stack.back())) fail(why);
    }
  }
  return stack.back();
}

}  // namespace octet

// What sizes decide: their arithmetic, values repeated to a larger shape, and checks that a plan stands for a call.
#include <algorithm>

#include "core/plan/lower.h"

namespace octet {

int64_t number_of(PlanBuilder& b, const Operation& operation, const SizeParts& size) {
  return size_of(
      size,
      [&](int64_t of, int64_t dim) {
        const PlanView& view = b.input(static_cast<Value>(of));
        return view.sizes[dimension(operation, dim, view.rank())];
      },
      [&](const char* why) { operation.fail(why); });
}

// Repeated values are read again and again from where they are: their stride is 0.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Expand& expand) {
  PlanView x = b.input(expand.x);
  const int64_t rank = static_cast<int64_t>(expand.shape.size()), fresh = rank - x.rank();
  expect(operation, fresh >= 0, "its input has more dimensions");
  Sizes sizes;
  for (int64_t d = 0; d < rank; ++d) {
    int64_t size = number_of(b, operation, expand.shape[d]);
    if (size == -1) {
      expect(operation, d >= fresh, "a new dimension has no size to keep");
      size = x.sizes[d - fresh];
    }
    expect(operation, size >= 0 && (d < fresh || x.sizes[d - fresh] == size || x.sizes[d - fresh] == 1),
           "its input has another size");
    sizes.push_back(size);
  }
  checked_count(operation, sizes);
  x.sizes.insert(x.sizes.begin(), fresh, 1);
  x.strides.insert(x.strides.begin(), fresh, 0);
  x.strides = repeated(x, sizes);
  x.sizes = sizes;
  return x;
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Holds& holds) {
  const int64_t found = number_of(b, operation, holds.size);
  expect_or(operation, found == holds.equals,
            [&] { return "is " + std::to_string(found) + ", expected " + std::to_string(holds.equals); });
  return b.input(holds.x);
}

}  // namespace octet

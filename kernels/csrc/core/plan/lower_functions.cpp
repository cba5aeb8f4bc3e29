// Functions of one value, sums over dimensions and choices by a mask, all of reals. kernels/reference_reals.py says what they
// mean.
#include <algorithm>

#include "core/cpu/threads.h"
#include "core/plan/lower.h"
#include "core/rows/reals.h"

namespace octet {
namespace {

// Value by value, so in the order in which they lie.
PlanView mapped(PlanBuilder& b, const PlanView& given, RealUnary function) {
  const PlanView x = b.dense(given);
  const PlanView out = b.fresh(x.sizes, x.strides, true);
  constexpr int64_t kChunk = 4096;
  b.emit({&x}, out, [=, n = x.count()](const PlanFrame& frame) {
    each_part((n + kChunk - 1) / kChunk, n * 16, [&](int64_t first, int64_t chunks) {
      const int64_t begin = first * kChunk, end = std::min(n, (first + chunks) * kChunk);
      function(x.reals(frame) + begin, end - begin, out.reals_out(frame) + begin);
    });
  });
  return out;
}

// The view with the dimensions in another order.
PlanView reordered(const PlanView& x, const Sizes& order) {
  PlanView moved = x;
  for (size_t d = 0; d < order.size(); ++d) moved.sizes[d] = x.sizes[order[d]], moved.strides[d] = x.strides[order[d]];
  return moved;
}

// The view repeated to a larger shape.
PlanView spread(const Operation& operation, PlanView x, const Sizes& sizes) {
  const size_t missing = sizes.size() - x.sizes.size();
  x.sizes.insert(x.sizes.begin(), missing, 1);
  x.strides.insert(x.strides.begin(), missing, 0);
  for (size_t d = 0; d < sizes.size(); ++d)
    expect(operation, x.sizes[d] == sizes[d] || x.sizes[d] == 1, "its operands have shapes that do not go together");
  x.strides = repeated(x, sizes);
  x.sizes = sizes;
  return x;
}

// The shape that three views have together.
Sizes common_sizes(const Operation& operation, const std::vector<PlanView>& views) {
  Sizes sizes;
  for (const PlanView& view : views) {
    if (view.sizes.size() > sizes.size()) sizes.insert(sizes.begin(), view.sizes.size() - sizes.size(), 1);
    const size_t missing = sizes.size() - view.sizes.size();
    for (size_t d = 0; d < view.sizes.size(); ++d)
      if (sizes[missing + d] == 1) sizes[missing + d] = view.sizes[d];
  }
  checked_count(operation, sizes);
  return sizes;
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::UnaryReal& unary) {
  return mapped(b, real_input(b, operation, unary.x), real_kernels().functions[static_cast<int>(unary.by)]);
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Silu& silu) {
  return mapped(b, real_input(b, operation, silu.x), real_kernels().silu);
}

// Of rows: the dimensions that are summed over are brought to the end. The sum of no values is 0, and their mean NaN.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::ReduceReal& by) {
  const PlanView given = real_input(b, operation, by.x);
  std::vector<bool> summed(given.rank(), false);
  for (const int64_t dim : by.dims) {
    const int64_t d = dimension(operation, dim, given.rank());
    expect(operation, !summed[d], "takes a dimension twice");
    summed[d] = true;
  }
  Sizes order, kept, sizes;
  int64_t n = 1;
  for (int64_t d = 0; d < given.rank(); ++d) {
    if (summed[d])
      n *= given.sizes[d];
    else
      order.push_back(d), kept.push_back(given.sizes[d]);
    if (!summed[d] || by.keepdim) sizes.push_back(summed[d] ? 1 : given.sizes[d]);
  }
  checked_count(operation, sizes);  // sums over no values are more than those
  for (int64_t d = 0; d < given.rank(); ++d)
    if (summed[d]) order.push_back(d);
  const PlanView x = b.plain(reordered(given, order));
  const PlanView out = b.fresh(sizes, plain_strides(sizes), true);
  const float divisor = by.mean ? static_cast<float>(n) : 1.0f;
  const int64_t rows = product(kept);
  b.emit({&x}, out, [=](const PlanFrame& frame) {
    each_part(rows, rows * n, [&](int64_t first, int64_t count) {
      for (int64_t i = first; i < first + count; ++i)
        out.reals_out(frame)[i] = real_kernels().sum(x.reals(frame) + i * n, n) / divisor;
    });
  });
  return out;
}

// The mask lies as the result does, so that one offset serves both.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::WhereReal& by) {
  const PlanView& bytes = b.input(by.mask);
  expect_dtype(operation, bytes, false);
  PlanView mask = bytes, left = real_input(b, operation, by.a), right = real_input(b, operation, by.b);
  const Sizes sizes = common_sizes(operation, {mask, left, right});
  mask = b.plain(spread(operation, mask, sizes));
  left = spread(operation, left, sizes), right = spread(operation, right, sizes);
  const PlanView out = b.fresh(sizes, plain_strides(sizes), true);
  const PlanLoops loops(sizes, {out.strides, left.strides, right.strides});
  b.emit({&mask, &left, &right}, out, [=](const PlanFrame& frame) {
    const uint8_t* const chosen = mask.bytes(frame);
    const float *const x = left.reals(frame), *const y = right.reals(frame);
    float* const to = out.reals_out(frame);
    each_part(loops.rows(), loops.rows() * loops.length() * 2, [&](int64_t first, int64_t rows) {
      loops.each(first, rows, [&](const int64_t* at) {
        for (int64_t i = 0; i < loops.length(); ++i)
          to[at[0] + i * loops.step(0)] =
              chosen[at[0] + i * loops.step(0)] ? x[at[1] + i * loops.step(1)] : y[at[2] + i * loops.step(2)];
      });
    });
  });
  return out;
}

}  // namespace octet

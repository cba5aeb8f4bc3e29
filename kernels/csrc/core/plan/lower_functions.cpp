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

// How many values lie side by side behind the dimensions that are summed; 0 where these are no neighbours in memory, or the others
// do not lie in their order.
int64_t columns_behind(const PlanView& x, const std::vector<bool>& summed) {
  Sizes order;
  for (int64_t d = 0; d < x.rank(); ++d)
    if (x.sizes[d] != 1) order.push_back(d);
  std::stable_sort(order.begin(), order.end(), [&](int64_t one, int64_t other) { return x.strides[one] > x.strides[other]; });
  int64_t beside = 1, columns = 1, runs = 0, last[2] = {-1, -1};
  for (size_t at = order.size(); at-- > 0; beside *= x.sizes[order[at]])
    if (x.strides[order[at]] != beside) return 0;
  for (size_t at = 0; at < order.size(); ++at) {
    const int64_t d = order[at];
    if (d < last[summed[d]]) return 0;
    last[summed[d]] = d;
    runs += summed[d] && (at == 0 || !summed[order[at - 1]]);
    columns = summed[d] ? 1 : columns * x.sizes[d];
  }
  return runs == 1 && !summed[order.back()] ? columns : 0;
}

// Sums of `n` rows of columns each, which no copy has to bring behind one another.
PlanView summed_columns(PlanBuilder& b, const PlanView& x, int64_t n, int64_t columns, float divisor, const Sizes& sizes) {
  const PlanView out = b.fresh(sizes, plain_strides(sizes), true);
  constexpr int64_t kTogether = 64;
  const int64_t pieces = (columns + kTogether - 1) / kTogether, groups = product(sizes) / columns;
  b.emit({&x}, out, [=](const PlanFrame& frame) {
    each_part(groups * pieces, groups * columns * n, [&](int64_t first, int64_t count) {
      for (int64_t i = first; i < first + count; ++i) {
        const int64_t group = i / pieces, begin = i % pieces * kTogether, width = std::min(kTogether, columns - begin);
        float* const to = out.reals_out(frame) + group * columns + begin;
        real_kernels().sum_columns(x.reals(frame) + group * n * columns + begin, n, columns, width, to);
        if (divisor != 1.0f) std::transform(to, to + width, to, [=](float sum) { return sum / divisor; });
      }
    });
  });
  return out;
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
  Sizes order, sizes;
  int64_t n = 1;
  for (int64_t d = 0; d < given.rank(); ++d) {
    if (summed[d])
      n *= given.sizes[d];
    else
      order.push_back(d);
    if (!summed[d] || by.keepdim) sizes.push_back(summed[d] ? 1 : given.sizes[d]);
  }
  checked_count(operation, sizes);  // sums over no values are more than those
  const float divisor = by.mean ? static_cast<float>(n) : 1.0f;
  const int64_t columns = columns_behind(given, summed);
  if (columns > 1) return summed_columns(b, given, n, columns, divisor, sizes);
  const int64_t rows = product(sizes);
  for (int64_t d = 0; d < given.rank(); ++d)
    if (summed[d]) order.push_back(d);
  const PlanView x = b.plain(reordered(given, order));
  const PlanView out = b.fresh(sizes, plain_strides(sizes), true);
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

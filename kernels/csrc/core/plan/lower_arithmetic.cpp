// Arithmetic of reals, their softmax and concatenations, and constants. kernels/reference_reals.py says what they mean.
#include <algorithm>

#include "core/cpu/threads.h"
#include "core/plan/lower.h"
#include "core/rows/rows.h"

namespace octet {

PlanView real_input(PlanBuilder& b, const Operation& operation, Value value) {
  const PlanView& view = b.input(value);
  expect_dtype(operation, view, true);
  return view;
}

PlanView combined(PlanBuilder& b, PlanView left, PlanView right, const Sizes& sizes, RealBinary kernel) {
  const auto loops_of = [&] { return PlanLoops(sizes, {plain_strides(sizes), repeated(left, sizes), repeated(right, sizes)}); };
  PlanLoops loops = loops_of();
  if (std::max(loops.step(1), loops.step(2)) > 1 || loops.step(0) != 1) {
    left = b.plain(left), right = b.plain(right);
    loops = loops_of();
  }
  const PlanView out = b.fresh(sizes, plain_strides(sizes), true);
  b.emit({&left, &right}, out, [=](const PlanFrame& frame) {
    const float *x = left.reals(frame), *y = right.reals(frame);
    float* const to = out.reals_out(frame);
    each_part(loops.rows(), loops.rows() * loops.length() * 4, [&](int64_t first, int64_t rows) {
      loops.each(first, rows, [&](const int64_t* at) {
        kernel(x + at[1], loops.step(1), y + at[2], loops.step(2), loops.length(), to + at[0]);
      });
    });
  });
  return out;
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::BinaryReal& by) {
  PlanView left = real_input(b, operation, by.a), right = real_input(b, operation, by.b);
  const Sizes sizes = broadcast(operation, left, right);
  const RealKernels& kernels = real_kernels();
  using By = op::BinaryReal::By;
  return combined(b, left, right, sizes,
                  by.by == By::kSub ? kernels.subtract : by.by == By::kMul ? kernels.multiply : kernels.divide);
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::WithNumber& by) {
  PlanView x = real_input(b, operation, by.x), number = b.held(std::make_shared<const std::vector<float>>(1, by.number), {});
  const Sizes sizes = broadcast(operation, x, number);
  const RealKernels& kernels = real_kernels();
  using By = op::WithNumber::By;
  if (by.by == By::kSubFrom) return combined(b, number, x, sizes, kernels.subtract);
  return combined(b, x, number, sizes,
                  by.by == By::kAdd   ? kernels.add
                  : by.by == By::kSub ? kernels.subtract
                  : by.by == By::kMul ? kernels.multiply
                                      : kernels.divide);
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::ConstantReal& by) {
  const PreparedConstant& constant = b.constant(operation, by.value, "value", "float32");
  return b.held(constant.reals, constant.sizes);
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::CatReal& cat) {
  std::vector<PlanView> parts;
  for (const Value value : cat.tensors) {
    PlanView part = real_input(b, operation, value);
    // torch leaves out empty vectors whatever the other shapes.
    if (part.rank() != 1 || part.sizes[0] != 0) parts.push_back(std::move(part));
  }
  if (parts.empty() && !cat.tensors.empty()) return b.input(cat.tensors[0]);
  expect(operation, !parts.empty(), "joins nothing");
  Sizes sizes = parts[0].sizes;
  const int64_t dim = dimension(operation, cat.dim, parts[0].rank());
  sizes[dim] = 0;
  for (const PlanView& part : parts) {
    expect(operation, part.rank() == parts[0].rank(), "its inputs differ in dimensions");
    for (int64_t d = 0; d < part.rank(); ++d)
      expect(operation, d == dim || part.sizes[d] == sizes[d], "its inputs differ in another dimension than the joined one");
    sizes[dim] += part.sizes[dim];
  }
  checked_count(operation, sizes);
  const PlanView out = b.fresh(sizes, plain_strides(sizes), true);
  PlanView to = out;
  for (const PlanView& part : parts) {
    to.sizes[dim] = part.sizes[dim];
    b.copy(part, to);
    to.offset += part.sizes[dim] * out.strides[dim];
  }
  return out;
}

// The rounding of the result is done in the same pass over each row, as a layer norm's is.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Softmax& by) {
  const PlanView x = b.plain(real_input(b, operation, by.x));
  expect(operation, x.rank() >= 1, "its input has no dimensions");
  const PlanView out = b.fresh(x.sizes, plain_strides(x.sizes), true);
  const int64_t n = x.sizes.back(), rows = n ? x.count() / n : 0;
  const bool logarithm = by.logarithm;
  const Operation* const rounding = by.rounding == kNowhere ? nullptr : &b.operation(by.rounding);
  const bool rounds = rounding && rounded_strides(*rounding->as<op::Quantize>(), x.sizes) == out.strides;
  const PlanView q = rounds ? b.fresh(x.sizes, out.strides) : out;
  const RowRange range = rounds ? rounding->as<op::Quantize>()->range : RowRange{};
  b.emit({&x, &q}, out, [=](const PlanFrame& frame) {
    each_part(rows, rows * n * 16, [&](int64_t first, int64_t count) {
      for (int64_t at = first * n; at < (first + count) * n; at += n) {
        float* const to = out.reals_out(frame) + at;
        real_kernels().softmax(x.reals(frame) + at, n, logarithm, to);
        if (rounds) frame.met(row_kernels().quantize(to, nullptr, n, range, 255, q.bytes_out(frame) + at, nullptr));
      }
    });
  });
  if (rounds) b.define(*rounding, q);
  return out;
}

}  // namespace octet

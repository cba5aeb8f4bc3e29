// Parts of a tensor that indices choose: taken, and added to. kernels/reference_indices.py says what they mean.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/cpu/threads.h"
#include "core/plan/lower.h"

namespace octet {
namespace {

constexpr int64_t kBytesPerThread = 1 << 16;
constexpr int64_t kAdditionsPerThread = 1 << 15;

// The place in a dimension that an index names; one below 0 counts from the end.
int64_t place_of(int64_t index, int64_t size, bool negative, const std::string& line) {
  const int64_t place = negative && index < 0 ? index + size : index;
  if (place < 0 || place >= size)
    throw std::out_of_range("plan line '" + line + "': index " + std::to_string(index) + " is outside a dimension of " +
                            std::to_string(size));
  return place;
}

PlanView indices_of(PlanBuilder& b, const Operation& operation, Value value) {
  const PlanView& index = b.input(value);
  expect(operation, index.index, "its indices are not int64");
  return index;
}

// The view without a dimension.
PlanView without(PlanView view, int64_t dim) {
  view.sizes.erase(view.sizes.begin() + dim);
  view.strides.erase(view.strides.begin() + dim);
  return view;
}

// x, and to its place index[i, ...] of `dim` is added source[i, ...], in the order of i. Threads have parts of that dimension, so that the
// order of additions is the same for any number of them. `one_for_all`: index[i, ...] is one number, which is there where source[i, ...]
// holds nothing too.
PlanView added_up(PlanBuilder& b, const Operation& operation, const PlanView& x, int64_t dim, const PlanView& index,
                  const PlanView& source, bool one_for_all) {
  for (int64_t d = 0; d < x.rank(); ++d)
    expect(operation, index.sizes[d] <= source.sizes[d] && (d == dim || index.sizes[d] <= x.sizes[d]),
           "its indices have more values than there are to add, or to add to");
  const PlanView out = b.fresh(x.sizes, plain_strides(x.sizes), true);
  b.copy(x, out);
  const PlanView places = without(index, dim);
  const PlanLoops loops(places.sizes, {without(out, dim).strides, places.strides, without(source, dim).strides});
  const bool alike = loops.step(1) == 0 && loops.length() > 1;  // one index for the whole row
  b.emit({&index, &source, &out}, out, [=, line = operation.text, n = index.sizes[dim]](const PlanFrame& frame) {
    const int64_t size = out.sizes[dim], length = loops.length(), to_step = loops.step(0), from_step = loops.step(2);
    const int64_t* const at = index.indices(frame);
    const float* const in = source.reals(frame);
    float* const to = out.reals_out(frame);
    if (one_for_all && loops.rows() * length == 0)  // nothing is added, and the indices are wrong or not
      for (int64_t i = 0; i < n; ++i) place_of(at[i * index.strides[dim]], size, false, line);
    const int64_t grain = kAdditionsPerThread * size / std::max<int64_t>(1, n * loops.rows() * length);
    // Of no places too there is one part, which refuses all indices.
    each_range(std::max<int64_t>(1, size), std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
      const auto add = [&](int64_t i, const int64_t* offsets) {
        const int64_t* const own = at + offsets[1] + i * index.strides[dim];
        const float* const from = in + offsets[2] + i * source.strides[dim];
        for (int64_t k = 0; k < (alike ? 1 : length); ++k) {
          const int64_t place = place_of(own[k * loops.step(1)], size, false, line);
          if (place < begin || place >= end) continue;
          float* const sums = to + offsets[0] + place * out.strides[dim];
          if (!alike)
            sums[k * to_step] += from[k * from_step];
          else if (to_step == 1 && from_step == 1)
            for (int64_t j = 0; j < length; ++j) sums[j] += from[j];
          else
            for (int64_t j = 0; j < length; ++j) sums[j * to_step] += from[j * from_step];
        }
      };
      constexpr int64_t kAtOnce[] = {0, 0, 0};
      for (int64_t i = 0; i < n; ++i)
        if (loops.rows() == 1)
          add(i, kAtOnce);
        else
          loops.each(0, loops.rows(), [&](const int64_t* offsets) { add(i, offsets); });
    });
  });
  return out;
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::IndexSelect& by) {
  const PlanView x = b.plain(b.input(by.x)), index = b.plain(indices_of(b, operation, by.index));
  const int64_t dim = dimension(operation, by.dim, x.rank());
  PlanView shape = x;
  shape.sizes.erase(shape.sizes.begin() + dim);
  shape.sizes.insert(shape.sizes.begin() + dim, index.sizes.begin(), index.sizes.end());
  checked_count(operation, shape.sizes);
  const PlanView out = b.fresh_like(shape, plain_strides(shape.sizes));
  const int64_t outer = product(Sizes(x.sizes.begin(), x.sizes.begin() + dim)), size = x.sizes[dim], n = index.count();
  const int64_t bytes = product(Sizes(x.sizes.begin() + dim + 1, x.sizes.end())) * x.element_bytes();
  b.emit({&x, &index}, out, [=, negative = by.negative, line = operation.text](const PlanFrame& frame) {
    const int64_t* const at = index.indices(frame);
    const uint8_t* const from = frame.buffers[x.buffer] + x.offset * x.element_bytes();
    uint8_t* const to = frame.buffers[out.buffer];
    if (outer == 0)  // each_range has nothing to do, and the indices are wrong or not
      for (int64_t i = 0; i < n; ++i) place_of(at[i], size, negative, line);
    each_range(outer * n, kBytesPerThread / std::max<int64_t>(1, bytes) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end;) {
        const int64_t first = i % n, count = std::min(end - i, n - first);
        const uint8_t* const part = from + i / n * size * bytes;
        const auto each = [&](const auto& copy) {
          for (int64_t k = 0; k < count; ++k)
            copy(to + (i + k) * bytes, part + place_of(at[first + k], size, negative, line) * bytes);
        };
        if (bytes == sizeof(float))
          each([](uint8_t* out, const uint8_t* in) { std::memcpy(out, in, sizeof(float)); });
        else
          each([bytes](uint8_t* out, const uint8_t* in) { std::copy_n(in, bytes, out); });
        i += count;
      }
    });
  });
  return out;
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::IndexAdd& by) {
  const PlanView x = real_input(b, operation, by.x), source = real_input(b, operation, by.source);
  PlanView index = indices_of(b, operation, by.index);
  const int64_t dim = dimension(operation, by.dim, x.rank());
  expect(operation, source.rank() == x.rank() && index.rank() == 1 && index.sizes[0] == source.sizes[dim],
         "what it adds has another shape than its indices name");
  for (int64_t d = 0; d < x.rank(); ++d)
    expect(operation, d == dim || source.sizes[d] == x.sizes[d], "what it adds has another size");
  Sizes strides(source.sizes.size(), 0);
  strides[dim] = index.strides[0];
  index.sizes = source.sizes, index.strides = strides;
  return added_up(b, operation, x, dim, index, source, true);
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::ScatterAdd& by) {
  const PlanView x = real_input(b, operation, by.x), source = real_input(b, operation, by.source);
  const PlanView index = indices_of(b, operation, by.index);
  const int64_t dim = dimension(operation, by.dim, x.rank());
  expect(operation, index.rank() == x.rank() && source.rank() == x.rank(), "its operands differ in dimensions");
  return added_up(b, operation, x, dim, index, source, false);
}

}  // namespace octet

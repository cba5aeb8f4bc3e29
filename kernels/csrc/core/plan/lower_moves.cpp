// What only moves values. Permuting and slicing make another view and cost nothing at run time.
#include <algorithm>
#include <cmath>

#include "core/gemm/workspace.h"
#include "core/plan/lower.h"
#include "core/rows/elementwise.h"

namespace octet {
namespace {

// Sizes of which some are those of other registers (%3.0 is the first size of %3) and one may be -1.
Sizes wanted_sizes(PlanBuilder& b, const Operation& operation, const op::Reshape& reshape, int64_t count) {
  Sizes sizes;
  int64_t open = -1;
  for (const SizeParts& size : reshape.shape) {
    sizes.push_back(number_of(b, operation, size));
    if (sizes.back() != -1) continue;
    expect(operation, open < 0, "its shape has two open sizes");
    open = static_cast<int64_t>(sizes.size()) - 1;
  }
  if (open >= 0) {
    sizes[open] = 1;
    const int64_t known = checked_count(operation, sizes);
    expect(operation, known > 0, "its open size could be any");
    sizes[open] = count / known;
  }
  expect_or(operation, checked_count(operation, sizes) == count,
            [&] { return "its input has " + std::to_string(count) + " values"; });
  return sizes;
}

PlanView with_sizes(PlanBuilder& b, const PlanView& x, const Sizes& sizes) {
  PlanView out;
  if (!reshaped(x, sizes, &out)) reshaped(b.plain(x), sizes, &out);
  return out;
}

PlanView narrowed(PlanView x, int64_t dim, int64_t begin, int64_t length, int64_t step = 1) {
  x.offset += begin * x.strides[dim];
  x.sizes[dim] = length;
  x.strides[dim] *= step;
  return x;
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Reshape& reshape) {
  const PlanView x = b.input(reshape.x);
  return with_sizes(b, x, wanted_sizes(b, operation, reshape, x.count()));
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Flatten& flatten) {
  const PlanView x = b.input(flatten.x);
  const int64_t begin = dimension(operation, flatten.start, x.rank()), end = dimension(operation, flatten.end, x.rank());
  expect(operation, begin <= end, "starts after its end");
  Sizes sizes(x.sizes.begin(), x.sizes.begin() + begin);
  sizes.push_back(product(Sizes(x.sizes.begin() + begin, x.sizes.begin() + end + 1)));
  sizes.insert(sizes.end(), x.sizes.begin() + end + 1, x.sizes.end());
  return with_sizes(b, x, sizes);
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Permute& permute) {
  const PlanView x = b.input(permute.x);
  PlanView out = x;
  const Sizes& dims = permute.dims;
  expect(operation, static_cast<int64_t>(dims.size()) == x.rank(), "its input has another number of dimensions");
  std::vector<bool> taken(dims.size(), false);
  for (size_t d = 0; d < dims.size(); ++d) {
    const int64_t from = dimension(operation, dims[d], x.rank());
    expect(operation, !taken[from], "takes a dimension twice");
    taken[from] = true;
    out.sizes[d] = x.sizes[from], out.strides[d] = x.strides[from];
  }
  return out;
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Transpose& transpose) {
  PlanView out = b.input(transpose.x);
  const int64_t one = dimension(operation, transpose.dim0, out.rank()), two = dimension(operation, transpose.dim1, out.rank());
  std::swap(out.sizes[one], out.sizes[two]);
  std::swap(out.strides[one], out.strides[two]);
  return out;
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Unsqueeze& unsqueeze) {
  PlanView out = b.input(unsqueeze.x);
  const int64_t dim = dimension(operation, unsqueeze.dim, out.rank() + 1);
  out.sizes.insert(out.sizes.begin() + dim, 1);
  out.strides.insert(out.strides.begin() + dim, 1);
  return out;
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Squeeze& squeeze) {
  PlanView out = b.input(squeeze.x);
  const int64_t dim = dimension(operation, squeeze.dim, out.rank());
  if (out.sizes[dim] != 1) return out;
  out.sizes.erase(out.sizes.begin() + dim);
  out.strides.erase(out.strides.begin() + dim);
  return out;
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Slice& slice) {
  const PlanView x = b.input(slice.x);
  const int64_t dim = dimension(operation, slice.dim, x.rank()), size = x.sizes[dim], step = slice.step;
  expect(operation, step > 0, "its step is not positive");
  const auto place = [&](const std::optional<SizeParts>& given, int64_t missing) {
    const int64_t at = given ? number_of(b, operation, *given) : missing;
    return std::clamp<int64_t>(at < 0 ? at + size : at, 0, size);
  };
  const int64_t begin = place(slice.start, 0), end = std::max(begin, place(slice.end, size));
  return narrowed(x, dim, begin, (end - begin + step - 1) / step, step);
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Select& select) {
  const PlanView x = b.input(select.x);
  const int64_t dim = dimension(operation, select.dim, x.rank());
  PlanView out = narrowed(x, dim, dimension(operation, select.index, x.sizes[dim]), 1);
  out.sizes.erase(out.sizes.begin() + dim);
  out.strides.erase(out.strides.begin() + dim);
  return out;
}

// Part `index` of what torch.chunk gives.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Chunk& chunk) {
  const PlanView x = b.input(chunk.x);
  const int64_t dim = dimension(operation, chunk.dim, x.rank()), size = x.sizes[dim];
  const int64_t each = std::max<int64_t>(1, (size + chunk.chunks - 1) / chunk.chunks);
  const int64_t parts = size ? (size + each - 1) / each : chunk.chunks;
  const int64_t begin = std::min(size, dimension(operation, chunk.index, parts) * each);
  return narrowed(x, dim, begin, std::min(each, size - begin));
}

PlanView lower(PlanBuilder& b, const Operation&, const op::Same& same) { return b.input(same.x); }

namespace {

using Rescale = std::shared_ptr<const RescaleSettings>;  // null where nothing changes

// How part `place` of a concatenation becomes one of its range.
Rescale rescale_of(const op::Cat& cat, size_t place) {
  if (cat.by.empty()) return nullptr;
  const RescaleSettings& settings = cat.by[place];
  for (int q = 0; q < 256; ++q)
    if (settings.table[q] != q) return std::make_shared<const RescaleSettings>(settings);
  return nullptr;
}

// As PlanBuilder::copy, into another range.
void copy_rescaled(PlanBuilder& b, const PlanView& from, const PlanView& to, Rescale how) {
  if (!how) return b.copy(from, to);
  const PlanLoops loops(from.sizes, {to.strides, from.strides});
  b.emit({&from}, to, [=](const PlanFrame& frame) {
    const uint8_t* x = from.bytes(frame);
    uint8_t* out = to.bytes_out(frame);
    const int64_t n = loops.length(), to_step = loops.step(0), from_step = loops.step(1);
    const auto rescale = element_kernels().rescale;
    each_part(loops.rows(), loops.rows() * n * 2, [&](int64_t first, int64_t rows) {
      loops.each(first, rows, [&](const int64_t* at) {
        if (to_step == 1 && from_step == 1) return rescale(*how, x + at[1], n, out + at[0]);
        for (int64_t i = 0; i < n; ++i) out[at[0] + i * to_step] = how->table[x[at[1] + i * from_step]];
      });
    });
  });
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Cat& cat) {
  std::vector<PlanView> parts;
  std::vector<Rescale> how;
  for (size_t place = 0; place < cat.tensors.size(); ++place) {
    PlanView part = b.input(cat.tensors[place]);
    expect_dtype(operation, part, false);
    // torch leaves out empty vectors whatever the other shapes.
    if (part.rank() == 1 && part.sizes[0] == 0) continue;
    parts.push_back(std::move(part));
    how.push_back(rescale_of(cat, place));
  }
  if (parts.empty() && !cat.tensors.empty()) return b.input(cat.tensors[0]);
  expect(operation, !parts.empty(), "joins nothing");
  const int64_t dim = dimension(operation, cat.dim, parts[0].rank());
  Sizes sizes = parts[0].sizes;
  sizes[dim] = 0;
  bool plain = true;
  for (const PlanView& part : parts) {
    expect(operation, part.rank() == parts[0].rank(), "its inputs differ in dimensions");
    for (int64_t d = 0; d < part.rank(); ++d)
      expect(operation, d == dim || part.sizes[d] == sizes[d], "its inputs differ in another dimension than the joined one");
    sizes[dim] += part.sizes[dim];
    plain &= part.has_strides(plain_strides(part.sizes));
  }
  const PlanView out = b.fresh(sizes, plain ? plain_strides(sizes) : channels_last_strides(sizes));
  int64_t begin = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    copy_rescaled(b, parts[i], narrowed(out, dim, begin, parts[i].sizes[dim]), how[i]);
    begin += parts[i].sizes[dim];
  }
  return out;
}

namespace {

template <class T>
T* first_of(const PlanFrame& frame, const PlanView& view) {
  return reinterpret_cast<T*>(frame.buffers[view.buffer]) + view.offset;
}

// The offsets of one row's values in all dimensions but the last, and where it is no row of fill.
struct RowOffset {
  int64_t at = 0;
  bool inside = true;

  RowOffset(const std::vector<Sizes>& from, int64_t row) {
    for (size_t d = from.size() - 1; d-- > 0; row /= static_cast<int64_t>(from[d].size())) {
      const int64_t offset = from[d][row % static_cast<int64_t>(from[d].size())];
      inside &= offset >= 0, at += offset;
    }
  }
};

// `from` has the offsets of the values in each dimension, the last one a row; `whole`: a row is copied as it lies.
template <class T>
void gather(PlanBuilder& b, const PlanView& x, const PlanView& out, const std::shared_ptr<std::vector<Sizes>>& from, bool whole, T fill) {
  const int64_t length = from->back().size(), rows = length ? out.count() / length : 0;
  b.emit({&x}, out, [=](const PlanFrame& frame) {
    each_part(rows, out.count() * 2, [&](int64_t first, int64_t count) {
      for (int64_t row = first; row < first + count; ++row) {
        T* const to = first_of<T>(frame, out) + row * length;
        const RowOffset offset(*from, row);
        if (!offset.inside || x.count() == 0) {
          std::fill_n(to, length, fill);
          continue;
        }
        const T* const source = first_of<const T>(frame, x) + offset.at;
        const Sizes& last = from->back();
        if (whole) {
          std::copy_n(source, length, to);
        } else {
          for (int64_t i = 0; i < length; ++i) to[i] = last[i] < 0 ? fill : source[last[i]];
        }
      }
    });
  });
}

}  // namespace

PlanView gathered(PlanBuilder& b, const PlanView& given, const std::vector<Sizes>& sources, uint8_t fill) {
  const bool plain = given.has_strides(plain_strides(given.sizes));
  const PlanView x = plain ? given : b.channels_last(given);
  Sizes sizes;
  for (const Sizes& axis : sources) sizes.push_back(static_cast<int64_t>(axis.size()));
  const PlanView out = b.fresh(sizes, plain ? plain_strides(sizes) : channels_last_strides(sizes), x.real);
  // Dimensions as they lie, so that the last one is a row.
  std::vector<size_t> order;
  for (size_t d = 0; d < sizes.size(); ++d) order.push_back(d);
  if (!plain && sizes.size() >= 3) order.erase(order.begin() + 1), order.push_back(1);
  const auto from = std::make_shared<std::vector<Sizes>>();
  for (const size_t d : order) {
    Sizes offsets = sources[d];
    for (int64_t& offset : offsets) offset = offset < 0 ? -1 : offset * x.strides[d];
    b.hold_table(offsets.size(), sizeof(int64_t));
    from->push_back(std::move(offsets));
  }
  const int64_t length = from->back().size();
  bool whole = x.sizes[order.back()] == length;
  for (int64_t i = 0; i < length; ++i) whole &= (*from).back()[i] == i;
  if (x.real)
    gather(b, x, out, from, whole, static_cast<float>(fill));
  else
    gather(b, x, out, from, whole, fill);
  return out;
}

namespace {

int64_t padded_source(const Operation& operation, op::PadMode mode, int64_t i, int64_t size) {
  if (i >= 0 && i < size) return i;
  switch (mode) {
    case op::PadMode::kConstant:
      return -1;
    case op::PadMode::kReplicate:
      return std::clamp<int64_t>(i, 0, size - 1);
    case op::PadMode::kCircular:
      expect(operation, i >= -size && i < 2 * size, "goes round its input more than once");
      return (i + size) % size;
    case op::PadMode::kReflect:
      break;
  }
  expect(operation, i > -size && i < 2 * size - 1, "pads more than its input has");
  return i < 0 ? -i : 2 * (size - 1) - i;
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Pad& pad) {
  const PlanView x = b.input(pad.q);
  const Widths widths = widths_of(operation, pad, x);
  Sizes sizes = x.sizes;
  for (size_t d = 0; d < sizes.size(); ++d) sizes[d] += widths.before[d] + widths.after[d];
  if (checked_count(operation, sizes) == 0) {
    // The outermost values say whether the widths fit the mode.
    for (size_t d = 0; d < sizes.size(); ++d)
      for (const int64_t i : {-widths.before[d], x.sizes[d] + widths.after[d] - 1})
        if (x.sizes[d] > 0) padded_source(operation, pad.mode, i, x.sizes[d]);
    return b.fresh(sizes, plain_strides(sizes), x.real);
  }
  std::vector<Sizes> sources;
  for (size_t d = 0; d < sizes.size(); ++d) {
    Sizes moved;
    for (int64_t i = -widths.before[d]; i < x.sizes[d] + widths.after[d]; ++i)
      moved.push_back(padded_source(operation, pad.mode, i, x.sizes[d]));
    sources.push_back(std::move(moved));
  }
  return gathered(b, x, sources, static_cast<uint8_t>(pad.fill));
}

}  // namespace octet

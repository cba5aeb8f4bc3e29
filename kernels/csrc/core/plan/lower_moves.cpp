// What only moves values. Permuting and slicing make another view and cost nothing at run time.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/gemm/workspace.h"
#include "core/plan/lower.h"
#include "core/rows/elementwise.h"

namespace octet {
namespace {

// Sizes of which some are those of other registers (%3.0 is the first size of %3) and one may be -1.
Sizes wanted_sizes(PlanBuilder& b, const PlanLine& line, int64_t count) {
  Sizes sizes;
  int64_t open = -1;
  for (const std::string& word : line.words("shape")) {
    const size_t dot = word.find('.');
    sizes.push_back(dot == std::string::npos ? parse_integer(line, word)
                                             : b.size_of(line, word.substr(0, dot), parse_integer(line, word.substr(dot + 1))));
    if (sizes.back() != -1) continue;
    expect(line, open < 0, "its shape has two open sizes");
    open = static_cast<int64_t>(sizes.size()) - 1;
  }
  if (open >= 0) {
    sizes[open] = 1;
    const int64_t known = checked_count(line, sizes);
    expect(line, known > 0, "its open size could be any");
    sizes[open] = count / known;
  }
  expect(line, checked_count(line, sizes) == count, "its input has " + std::to_string(count) + " values");
  return sizes;
}

PlanView with_sizes(PlanBuilder& b, const PlanView& x, const Sizes& sizes) {
  PlanView out;
  if (!reshaped(x, sizes, &out)) reshaped(b.plain(x), sizes, &out);
  return out;
}

PlanView reshape(PlanBuilder& b, const PlanLine& line) {
  const PlanView x = b.input(line, "x");
  return with_sizes(b, x, wanted_sizes(b, line, x.count()));
}

PlanView flatten(PlanBuilder& b, const PlanLine& line) {
  const PlanView x = b.input(line, "x");
  const int64_t begin = dimension(line, line.integer("start"), x.rank()), end = dimension(line, line.integer("end"), x.rank());
  expect(line, begin <= end, "starts after its end");
  Sizes sizes(x.sizes.begin(), x.sizes.begin() + begin);
  sizes.push_back(product(Sizes(x.sizes.begin() + begin, x.sizes.begin() + end + 1)));
  sizes.insert(sizes.end(), x.sizes.begin() + end + 1, x.sizes.end());
  return with_sizes(b, x, sizes);
}

PlanView permute(PlanBuilder& b, const PlanLine& line) {
  const PlanView x = b.input(line, "x");
  PlanView out = x;
  const Sizes dims = line.integers("dims");
  expect(line, static_cast<int64_t>(dims.size()) == x.rank(), "its input has another number of dimensions");
  std::vector<bool> taken(dims.size(), false);
  for (size_t d = 0; d < dims.size(); ++d) {
    const int64_t from = dimension(line, dims[d], x.rank());
    expect(line, !taken[from], "takes a dimension twice");
    taken[from] = true;
    out.sizes[d] = x.sizes[from], out.strides[d] = x.strides[from];
  }
  return out;
}

PlanView transpose(PlanBuilder& b, const PlanLine& line) {
  PlanView out = b.input(line, "x");
  const int64_t one = dimension(line, line.integer("dim0"), out.rank()), two = dimension(line, line.integer("dim1"), out.rank());
  std::swap(out.sizes[one], out.sizes[two]);
  std::swap(out.strides[one], out.strides[two]);
  return out;
}

PlanView unsqueeze(PlanBuilder& b, const PlanLine& line) {
  PlanView out = b.input(line, "x");
  const int64_t dim = dimension(line, line.integer("dim"), out.rank() + 1);
  out.sizes.insert(out.sizes.begin() + dim, 1);
  out.strides.insert(out.strides.begin() + dim, 1);
  return out;
}

PlanView squeeze(PlanBuilder& b, const PlanLine& line) {
  PlanView out = b.input(line, "x");
  const int64_t dim = dimension(line, line.integer("dim"), out.rank());
  if (out.sizes[dim] != 1) return out;
  out.sizes.erase(out.sizes.begin() + dim);
  out.strides.erase(out.strides.begin() + dim);
  return out;
}

PlanView narrowed(PlanView x, int64_t dim, int64_t begin, int64_t length, int64_t step = 1) {
  x.offset += begin * x.strides[dim];
  x.sizes[dim] = length;
  x.strides[dim] *= step;
  return x;
}

PlanView slice(PlanBuilder& b, const PlanLine& line) {
  const PlanView x = b.input(line, "x");
  const int64_t dim = dimension(line, line.integer("dim"), x.rank()), size = x.sizes[dim], step = line.integer("step");
  expect(line, step > 0, "its step is not positive");
  const auto place = [&](std::string_view name, int64_t missing) {
    const int64_t given = line.has(name) ? line.integer(name) : missing;
    return std::clamp<int64_t>(given < 0 ? given + size : given, 0, size);
  };
  const int64_t begin = place("start", 0), end = std::max(begin, place("end", size));
  return narrowed(x, dim, begin, (end - begin + step - 1) / step, step);
}

PlanView select(PlanBuilder& b, const PlanLine& line) {
  const PlanView x = b.input(line, "x");
  const int64_t dim = dimension(line, line.integer("dim"), x.rank());
  PlanView out = narrowed(x, dim, dimension(line, line.integer("index"), x.sizes[dim]), 1);
  out.sizes.erase(out.sizes.begin() + dim);
  out.strides.erase(out.strides.begin() + dim);
  return out;
}

// Part `index` of what torch.chunk gives.
PlanView chunk(PlanBuilder& b, const PlanLine& line) {
  const PlanView x = b.input(line, "x");
  const int64_t dim = dimension(line, line.integer("dim"), x.rank()), size = x.sizes[dim];
  const int64_t each = std::max<int64_t>(1, (size + line.integer("chunks") - 1) / line.integer("chunks"));
  const int64_t parts = size ? (size + each - 1) / each : line.integer("chunks");
  const int64_t begin = std::min(size, dimension(line, line.integer("index"), parts) * each);
  return narrowed(x, dim, begin, std::min(each, size - begin));
}

PlanView same(PlanBuilder& b, const PlanLine& line) { return b.input(line, "x"); }

using Rescale = std::shared_ptr<const RescaleSettings>;  // null where nothing changes

// How part `place` of a concatenation becomes one of its range.
Rescale rescale_of(const PlanLine& line, size_t place) {
  if (!line.has("multipliers")) return nullptr;
  const Sizes zeros = line.integers("zero_points");
  const std::vector<double> multipliers = line.numbers("multipliers");
  RescaleSettings settings{static_cast<int32_t>(zeros[place]), static_cast<float>(multipliers[place]),
                           byte(line, "output_zero_point"), {}};
  settings.fill_table();
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

PlanView cat(PlanBuilder& b, const PlanLine& line) {
  std::vector<PlanView> parts;
  std::vector<Rescale> how;
  const std::vector<std::string> words = line.words("tensors");
  for (size_t place = 0; place < words.size(); ++place) {
    PlanView part = b.at(line, parse_register(line, words[place]));
    expect_dtype(line, part, false);
    // torch leaves out empty vectors whatever the other shapes.
    if (part.rank() == 1 && part.sizes[0] == 0) continue;
    parts.push_back(std::move(part));
    how.push_back(rescale_of(line, place));
  }
  expect(line, !parts.empty(), "joins nothing");
  const int64_t dim = dimension(line, line.integer("dim"), parts[0].rank());
  Sizes sizes = parts[0].sizes;
  sizes[dim] = 0;
  bool plain = true;
  for (const PlanView& part : parts) {
    expect(line, part.rank() == parts[0].rank(), "its inputs differ in dimensions");
    for (int64_t d = 0; d < part.rank(); ++d)
      expect(line, d == dim || part.sizes[d] == sizes[d], "its inputs differ in another dimension than the joined one");
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

// out[i, j, ...] = x[sources[0][i], sources[1][j], ...], and `fill` where a source is -1.
PlanView gathered(PlanBuilder& b, const PlanView& given, const std::vector<Sizes>& sources, uint8_t fill) {
  const bool plain = given.has_strides(plain_strides(given.sizes));
  const PlanView x = plain ? given : b.channels_last(given);
  Sizes sizes;
  for (const Sizes& axis : sources) sizes.push_back(static_cast<int64_t>(axis.size()));
  const PlanView out = b.fresh(sizes, plain ? plain_strides(sizes) : channels_last_strides(sizes));
  // Dimensions as they lie, so that the last one is a row.
  std::vector<size_t> order;
  for (size_t d = 0; d < sizes.size(); ++d) order.push_back(d);
  if (!plain && sizes.size() >= 3) order.erase(order.begin() + 1), order.push_back(1);
  const auto from = std::make_shared<std::vector<Sizes>>();
  for (const size_t d : order) {
    Sizes offsets = sources[d];
    for (int64_t& offset : offsets) offset = offset < 0 ? -1 : offset * x.strides[d];
    from->push_back(std::move(offsets));
  }
  const int64_t length = from->back().size(), rows = length ? out.count() / length : 0;
  bool whole = x.sizes[order.back()] == length;
  for (int64_t i = 0; i < length; ++i) whole &= (*from).back()[i] == i;
  b.emit({&x}, out, [=](const PlanFrame& frame) {
    each_part(rows, out.count() * 2, [&](int64_t first, int64_t count) {
      for (int64_t row = first; row < first + count; ++row) {
        uint8_t* to = out.bytes_out(frame) + row * length;
        int64_t at = 0, rest = row;
        bool inside = true;
        for (size_t d = from->size() - 1; d-- > 0;) {
          const Sizes& axis = (*from)[d];
          const int64_t offset = axis[rest % static_cast<int64_t>(axis.size())];
          rest /= static_cast<int64_t>(axis.size());
          inside &= offset >= 0;
          at += offset;
        }
        if (!inside) {
          std::memset(to, fill, length);
        } else if (whole) {
          std::memcpy(to, x.bytes(frame) + at, length);
        } else {
          const Sizes& last = from->back();
          for (int64_t i = 0; i < length; ++i) to[i] = last[i] < 0 ? fill : x.bytes(frame)[at + last[i]];
        }
      }
    });
  });
  return out;
}

Sizes everything(int64_t size) {
  Sizes sources(size);
  for (int64_t i = 0; i < size; ++i) sources[i] = i;
  return sources;
}

int64_t padded_source(const PlanLine& line, const std::string& mode, int64_t i, int64_t size) {
  if (i >= 0 && i < size) return i;
  if (mode == "constant") return -1;
  if (mode == "replicate") return std::clamp<int64_t>(i, 0, size - 1);
  if (mode == "circular") {
    expect(line, i >= -size && i < 2 * size, "goes round its input more than once");
    return (i + size) % size;
  }
  expect(line, mode == "reflect" && i > -size && i < 2 * size - 1, "pads more than its input has");
  return i < 0 ? -i : 2 * (size - 1) - i;
}

PlanView pad(PlanBuilder& b, const PlanLine& line) {
  const PlanView x = b.input(line, "q");
  expect_dtype(line, x, false);
  const Widths widths = widths_of(line, x);
  Sizes sizes = x.sizes;
  for (size_t d = 0; d < sizes.size(); ++d) sizes[d] += widths.before[d] + widths.after[d];
  checked_count(line, sizes);
  std::vector<Sizes> sources;
  for (size_t d = 0; d < sizes.size(); ++d) {
    Sizes moved;
    for (int64_t i = -widths.before[d]; i < x.sizes[d] + widths.after[d]; ++i)
      moved.push_back(padded_source(line, line.word("mode"), i, x.sizes[d]));
    sources.push_back(std::move(moved));
  }
  return gathered(b, x, sources, static_cast<uint8_t>(byte(line, "fill")));
}

// torch's nearest neighbours, in float32 as there (UpSample.h).
Sizes nearest(int64_t size, int64_t outputs, double factor, bool exact) {
  const float scale = factor > 0 ? static_cast<float>(1.0 / factor) : static_cast<float>(size) / static_cast<float>(outputs);
  Sizes sources(outputs);
  for (int64_t i = 0; i < outputs; ++i) {
    const float place = (static_cast<float>(i) + (exact ? 0.5f : 0.0f)) * scale;
    sources[i] = std::min(static_cast<int64_t>(std::floor(place)), size - 1);
  }
  return sources;
}

PlanView interpolate(PlanBuilder& b, const PlanLine& line) {
  const PlanView x = b.input(line, "q");
  expect_dtype(line, x, false);
  expect(line, x.rank() >= 3 && x.rank() <= 5, "its input has no spatial dimensions, or more than three");
  const size_t dims = x.sizes.size() - 2;
  const bool exact = line.word("mode") == "nearest-exact", sized = line.has("size");
  expect(line, exact || line.word("mode") == "nearest", "its mode has no plan");
  std::vector<Sizes> sources{everything(x.sizes[0]), everything(x.sizes[1])};
  Sizes wanted = sized ? line.integers("size") : Sizes{};
  std::vector<double> factors = sized ? std::vector<double>{} : line.numbers("scale_factor");
  if (line.word(sized ? "size" : "scale_factor").find(',') == std::string::npos)  // one number for all
    sized ? wanted.resize(dims, wanted[0]) : factors.resize(dims, factors[0]);
  expect(line, (sized ? wanted.size() : factors.size()) == dims, "its size has another number of dimensions");
  Sizes sizes{x.sizes[0], x.sizes[1]};
  for (size_t d = 0; d < dims; ++d) {
    const int64_t size = x.sizes[d + 2];
    const double scaled = sized ? static_cast<double>(wanted[d]) : std::floor(static_cast<double>(size) * factors[d]);
    expect(line, scaled > 0 && size > 0 && x.sizes[1] > 0, "it would be empty");
    sizes.push_back(static_cast<int64_t>(std::min(scaled, 1e15)));
  }
  checked_count(line, sizes);
  const bool by_size = sized || line.flag("recompute_scale_factor");
  for (size_t d = 0; d < dims; ++d)
    sources.push_back(nearest(x.sizes[d + 2], sizes[d + 2], by_size ? 0.0 : factors[d], exact));
  // The same value for every integer, so requantising is a look-up.
  auto table = std::make_shared<std::vector<uint8_t>>(256);
  const int32_t zero_point = byte(line, "zero_point"), output_zero = byte(line, "output_zero_point");
  const float multiplier = static_cast<float>(line.number("multiplier"));
  RescaleSettings settings{zero_point, multiplier, output_zero, {}};
  settings.fill_table();
  std::copy(settings.table, settings.table + 256, table->begin());
  bool unchanged = true;
  for (int q = 0; q < 256; ++q) unchanged &= (*table)[q] == q;
  const PlanView rescaled = unchanged ? x : looked_up(b, x, table);
  return gathered(b, rescaled, sources, 0);
}

}  // namespace

const PlanOperators& move_operators() {
  static const PlanOperators operators = {
      {"pad", &pad},           {"interpolate", &interpolate}, {"cat", &cat},       {"reshape", &reshape},
      {"flatten", &flatten},   {"permute", &permute},         {"transpose", &transpose}, {"unsqueeze", &unsqueeze},
      {"squeeze", &squeeze},   {"slice", &slice},             {"select", &select}, {"chunk", &chunk},
      {"same", &same},
  };
  return operators;
}

}  // namespace octet

// Elementwise operations, and the checks that all operations share.
#include "core/plan/lower.h"

#include <algorithm>

#include "core/cpu/transpose.h"
#include "core/gemm/workspace.h"
#include "core/rows/elementwise.h"
#include "core/rows/rows.h"

namespace octet {
namespace {

constexpr int64_t kChunk = 4096;
constexpr int64_t kMostPlanes = 4;  // that `interleave` takes

// fn(first, count) over [0, n), shared among threads; `cost` is what one element costs, in products.
template <class Fn>
void each_chunk(int64_t n, int64_t cost, Fn fn) {
  each_part((n + kChunk - 1) / kChunk, n * cost, [&](int64_t first, int64_t chunks) {
    fn(first * kChunk, std::min(n, (first + chunks) * kChunk) - first * kChunk);
  });
}

}  // namespace

void expect_dtype(const Operation& operation, const PlanView& view, bool real) {
  expect(operation, !view.index, real ? "its input is int64, expected float32" : "its input is int64, expected uint8");
  expect(operation, view.real == real, real ? "its input is uint8, expected float32" : "its input is float32, expected uint8");
}

int64_t checked_count(const Operation& operation, const Sizes& sizes) {
  constexpr int64_t most = int64_t{1} << 40;
  int64_t count = 1;
  for (const int64_t size : sizes) {
    expect_or(operation, size >= 0, [&] { return "a size is " + std::to_string(size); });
    const int64_t factor = std::max<int64_t>(size, 1);  // an empty tensor has strides, too
    expect(operation, count <= most / factor, "its result would hold more than 2**40 values");
    count *= factor;
  }
  return std::find(sizes.begin(), sizes.end(), 0) == sizes.end() ? count : 0;
}

Widths widths_of(const Operation& operation, const op::Pad& pad, const PlanView& x) {
  const Sizes& widths = pad.widths;
  const int64_t rank = x.rank(), pairs = static_cast<int64_t>(widths.size()) / 2;
  const bool constant = pad.mode == op::PadMode::kConstant;
  expect(operation, widths.size() % 2 == 0 && pairs <= rank, "its widths are not in pairs, or more than its input's dimensions");
  expect(operation, constant || (pairs <= 3 && (rank == pairs + 1 || rank == pairs + 2)),
         "its mode is for the last dimensions of all but one or two");
  expect(operation, constant || std::find(x.sizes.begin() + (rank - pairs - 1), x.sizes.end(), 0) == x.sizes.end(),
         "its input has no values to repeat");
  Widths found{Sizes(rank, 0), Sizes(rank, 0)};
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t before = widths[2 * pair], after = widths[2 * pair + 1], d = rank - 1 - pair;
    expect(operation, std::max<int64_t>(0, -before) + std::max<int64_t>(0, -after) <= x.sizes[d],
           "cuts away more than its input has");
    expect(operation, constant || (before >= 0 && after >= 0), "its mode cuts nothing away");
    found.before[d] = before, found.after[d] = after;
  }
  return found;
}

int64_t dimension(const Operation& operation, int64_t dim, int64_t rank) {
  const int64_t found = dim < 0 ? dim + rank : dim;
  if (found < 0 || found >= rank)
    operation.fail("dimension " + std::to_string(dim) + " of a tensor of " + std::to_string(rank) + " dimensions");
  return found;
}

PlanView looked_up(PlanBuilder& b, const PlanView& source, std::shared_ptr<const std::vector<uint8_t>> table) {
  const PlanView x = b.dense(source);
  const PlanView out = b.fresh(x.sizes, x.strides);
  b.emit({&x}, out, [=, n = x.count()](const PlanFrame& frame) {
    each_chunk(n, 2, [&](int64_t first, int64_t count) {
      element_kernels().lookup(table->data(), x.bytes(frame) + first, count, out.bytes_out(frame) + first);
    });
  });
  return out;
}

namespace {

// fn(sample, first pixel, pixels) over pieces of all samples, shared among threads.
template <class Fn>
void each_piece(int64_t batch, int64_t pixels, int64_t piece, int64_t cost, Fn fn) {
  const int64_t parts = (pixels + piece - 1) / piece;
  each_part(batch * parts, cost, [&](int64_t first, int64_t count) {
    for (int64_t part = first; part < first + count; ++part) {
      const int64_t begin = part % parts * piece;
      fn(part / parts, begin, std::min(piece, pixels - begin));
    }
  });
}

struct Planes {
  int64_t batch, channels, pixels;
};

// Whether channels lie apart in the one view, as torch's images do, and side by side in the other.
bool between_planes(const PlanView& apart, const PlanView& together) {
  return apart.rank() >= 3 && apart.sizes[1] >= 2 && apart.has_strides(plain_strides(apart.sizes)) &&
         together.has_strides(channels_last_strides(together.sizes)) &&
         !apart.has_strides(channels_last_strides(apart.sizes));
}

Planes planes_of(const PlanView& x) { return {x.sizes[0], x.sizes[1], product(Sizes(x.sizes.begin() + 2, x.sizes.end()))}; }

// Quantises channels that are apart, as in torch's images, each as a row, and then interleaves them.
void quantize_planes(PlanBuilder& b, const PlanView& x, RowRange range, const PlanView& out) {
  const Planes planes = planes_of(x);
  const int64_t batch = planes.batch, channels = planes.channels, pixels = planes.pixels;
  if (channels <= kMostPlanes) {
    b.emit({&x}, out, [=](const PlanFrame& frame) {
      each_piece(batch, pixels, kChunk, x.count() * 4, [&](int64_t sample, int64_t begin, int64_t n) {
        uint8_t rows[kMostPlanes * kChunk];
        for (int64_t c = 0; c < channels; ++c)
          frame.met(row_kernels().quantize(x.reals(frame) + (sample * channels + c) * pixels + begin, nullptr, n, range, 255,
                                           rows + c * kChunk, nullptr));
        element_kernels().interleave(rows, kChunk, channels, n, out.bytes_out(frame) + (sample * pixels + begin) * channels);
      });
    });
    return;
  }
  b.emit({&x}, out, [=](const PlanFrame& frame) {
    each_piece(batch, pixels, kTilePixels, x.count() * 4, [&](int64_t sample, int64_t begin, int64_t n) {
      uint8_t rows[kTileChannels * kTilePixels];
      each_tile(n, channels, [&](int64_t, int64_t, int64_t first, int64_t count) {
        for (int64_t c = 0; c < count; ++c)
          frame.met(row_kernels().quantize(x.reals(frame) + (sample * channels + first + c) * pixels + begin, nullptr, n, range,
                                           255, rows + c * kTilePixels, nullptr));
        transpose(rows, kTilePixels, count, n, out.bytes_out(frame) + (sample * pixels + begin) * channels + first, channels);
      });
    });
  });
}

// The opposite: separates interleaved channels, and dequantises each as a row.
void dequantize_planes(PlanBuilder& b, const PlanView& q, float scale, int32_t zero_point, const PlanView& out) {
  const Planes planes = planes_of(q);
  const int64_t batch = planes.batch, channels = planes.channels, pixels = planes.pixels;
  b.emit({&q}, out, [=](const PlanFrame& frame) {
    each_piece(batch, pixels, kTilePixels, q.count() * 4, [&](int64_t sample, int64_t begin, int64_t n) {
      uint8_t rows[kTileChannels * kTilePixels];
      each_tile(n, channels, [&](int64_t, int64_t, int64_t first, int64_t count) {
        transpose(q.bytes(frame) + (sample * pixels + begin) * channels + first, channels, n, count, rows, kTilePixels);
        for (int64_t c = 0; c < count; ++c)
          row_kernels().dequantize(rows + c * kTilePixels, n, scale, zero_point,
                                   out.reals_out(frame) + (sample * channels + first + c) * pixels + begin);
      });
    });
  });
}

}  // namespace

Sizes rounded_strides(const op::Quantize& quantize, const Sizes& sizes) {
  return quantize.for_linear ? plain_strides(sizes) : channels_last_strides(sizes);
}

PlanView quantized(PlanBuilder& b, const Operation& operation, const op::Quantize& quantize, const PlanView& x) {
  expect_dtype(operation, x, true);
  const PlanView out = b.fresh(x.sizes, rounded_strides(quantize, x.sizes));
  const RowRange range = quantize.range;
  // Inputs of linear layers are contiguous (`rounded_strides`), and short sequences look like images of few channels.
  if (between_planes(x, out)) {
    quantize_planes(b, x, range, out);
    return out;
  }
  // Rows as the reals lie, so that they are read and rounded as vectors; bytes are cheap to scatter.
  const PlanLoops loops(x.sizes, {x.strides, out.strides});
  b.emit({&x}, out, [=](const PlanFrame& frame) {
    const float* from = x.reals(frame);
    uint8_t* to = out.bytes_out(frame);
    const int64_t n = loops.length(), x_step = loops.step(0), out_step = loops.step(1);
    each_part(loops.rows(), loops.rows() * n * 4, [&](int64_t first, int64_t rows) {
      uint8_t block[kChunk];
      float gathered[kChunk];
      loops.each(first, rows, [&](const int64_t* at) {
        for (int64_t i = 0; i < n; i += kChunk) {
          const int64_t part = std::min(kChunk, n - i);
          const float* in = from + at[0] + i * x_step;
          uint8_t* q = to + at[1] + i * out_step;
          if (x_step != 1) {
            for (int64_t j = 0; j < part; ++j) gathered[j] = in[j * x_step];
            in = gathered;
          }
          frame.met(row_kernels().quantize(in, nullptr, part, range, 255, out_step == 1 ? q : block, nullptr));
          if (out_step != 1)
            for (int64_t j = 0; j < part; ++j) q[j * out_step] = block[j];
        }
      });
    });
  });
  return out;
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Quantize& quantize) {
  return quantized(b, operation, quantize, b.input(quantize.x));
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Dequantize& dequantize) {
  const PlanView q = b.dense(b.input(dequantize.q));
  expect_dtype(operation, q, false);
  const float scale = dequantize.scale;
  const int32_t zero_point = dequantize.zero_point;
  // Outputs are contiguous and best written so at once; other readers take channels in any order.
  PlanView plain = q;
  plain.strides = plain_strides(q.sizes);
  if (dequantize.given_out && between_planes(plain, q)) {
    plain = b.fresh(q.sizes, plain.strides, true);
    dequantize_planes(b, q, scale, zero_point, plain);
    return plain;
  }
  const PlanView out = b.fresh(q.sizes, q.strides, true);
  b.emit({&q}, out, [=, n = q.count()](const PlanFrame& frame) {
    each_chunk(n, 2, [&](int64_t first, int64_t count) {
      row_kernels().dequantize(q.bytes(frame) + first, count, scale, zero_point, out.reals_out(frame) + first);
    });
  });
  return out;
}

// A clamp of floats, for a layer with float output.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Clamp& clamp) {
  const PlanView x = b.dense(b.input(clamp.x));
  expect_dtype(operation, x, true);
  const PlanView out = b.fresh(x.sizes, x.strides, true);
  const float low = clamp.low, high = clamp.high;
  b.emit({&x}, out, [=, n = x.count()](const PlanFrame& frame) {
    const float* in = x.reals(frame);
    float* y = out.reals_out(frame);
    for (int64_t i = 0; i < n; ++i) {
      const float v = in[i] < low ? low : in[i];
      y[i] = v > high ? high : v;
    }
  });
  return out;
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Lookup& lookup) {
  PlanView x = b.input(lookup.q);
  expect_dtype(operation, x, false);
  const PreparedConstant& found = b.constant(operation, lookup.table, "table", "uint8");
  const auto table = found.bytes;
  const Sizes& shape = found.sizes;
  expect(operation, (shape.size() == 1 || shape.size() == 2) && shape.back() == 256, "its table has no 256 entries");
  if (shape.size() == 1) return looked_up(b, x, table);
  const int64_t axis = dimension(operation, lookup.axis, x.rank()), channels = shape[0];
  expect_or(operation, x.sizes[axis] == channels, [&] { return "its table is for " + std::to_string(channels) + " channels"; });
  x = axis == 1 ? b.channels_last(x) : b.plain(x);
  const PlanView out = b.fresh(x.sizes, x.strides);
  b.emit({&x}, out, [=, n = x.count(), step = x.strides[axis]](const PlanFrame& frame) {
    const uint8_t* in = x.bytes(frame);
    uint8_t* y = out.bytes_out(frame);
    for (int64_t i = 0, c = 0, s = 0; i < n; ++i) {
      y[i] = (*table)[c * 256 + in[i]];
      if (++s < step) continue;
      s = 0;
      if (++c == channels) c = 0;
    }
  });
  return out;
}

Sizes broadcast(const Operation& operation, PlanView& left, PlanView& right) {
  const size_t rank = std::max(left.sizes.size(), right.sizes.size());
  for (PlanView* view : {&left, &right}) {
    const size_t missing = rank - view->sizes.size();
    view->sizes.insert(view->sizes.begin(), missing, 1);
    view->strides.insert(view->strides.begin(), missing, 1);
  }
  Sizes sizes(rank);
  for (size_t d = 0; d < rank; ++d) {
    expect(operation, left.sizes[d] == right.sizes[d] || left.sizes[d] == 1 || right.sizes[d] == 1,
           "its inputs have shapes that do not go together");
    sizes[d] = left.sizes[d] == 1 ? right.sizes[d] : left.sizes[d];
  }
  checked_count(operation, sizes);
  return sizes;
}

Sizes repeated(const PlanView& view, const Sizes& sizes) {
  Sizes strides = view.strides;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (view.sizes[d] == 1 && sizes[d] != 1) strides[d] = 0;
  return strides;
}

namespace {

bool rows_can_be_read(const PlanLoops& loops) {
  return loops.step(0) == 1 && (loops.step(1) == 0 || loops.step(1) == 1) && (loops.step(2) == 0 || loops.step(2) == 1);
}

// compute(a, its step, b, its step, n, out) for every row of two values, broadcast: of any elementwise operator.
template <class Compute>
PlanView of_two(PlanBuilder& b, const Operation& operation, Value q_a, Value q_b, Compute compute) {
  PlanView left = b.input(q_a), right = b.input(q_b);
  expect_dtype(operation, left, false);
  expect_dtype(operation, right, false);
  const Sizes sizes = broadcast(operation, left, right);
  const PlanView& larger = left.count() >= right.count() ? left : right;
  const bool plain =
      larger.has_strides(plain_strides(larger.sizes)) && !larger.has_strides(channels_last_strides(larger.sizes));
  const Sizes strides = plain ? plain_strides(sizes) : channels_last_strides(sizes);
  PlanLoops loops(sizes, {strides, repeated(left, sizes), repeated(right, sizes)});
  if (!rows_can_be_read(loops)) {
    left = plain ? b.plain(left) : b.channels_last(left);
    right = plain ? b.plain(right) : b.channels_last(right);
    loops = PlanLoops(sizes, {strides, repeated(left, sizes), repeated(right, sizes)});
  }
  const PlanView out = b.fresh(sizes, strides);
  b.emit({&left, &right}, out, [=](const PlanFrame& frame) {
    const uint8_t *x = left.bytes(frame), *y = right.bytes(frame);
    uint8_t* to = out.bytes_out(frame);
    const int x_step = static_cast<int>(loops.step(1)), y_step = static_cast<int>(loops.step(2));
    if (loops.rows() == 1)
      return each_chunk(loops.length(), 4, [&](int64_t first, int64_t n) {
        compute(x + first * x_step, x_step, y + first * y_step, y_step, n, to + first);
      });
    each_part(loops.rows(), loops.rows() * loops.length() * 4, [&](int64_t first, int64_t rows) {
      loops.each(first, rows, [&](const int64_t* at) {
        compute(x + at[1], x_step, y + at[2], y_step, loops.length(), to + at[0]);
      });
    });
  });
  return out;
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Add& add) {
  return of_two(b, operation, add.a, add.b,
                [by = add.by](const uint8_t* x, int x_step, const uint8_t* y, int y_step, int64_t n, uint8_t* out) {
                  element_kernels().add(by, x, x_step, y, y_step, n, out);
                });
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Binary& binary) {
  return of_two(b, operation, binary.a, binary.b,
                [by = binary.by, row = binary.kind->row](const uint8_t* x, int x_step, const uint8_t* y, int y_step, int64_t n,
                                                         uint8_t* out) { row(by, x, x_step, y, y_step, n, out); });
}

}  // namespace octet

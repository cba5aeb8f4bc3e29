// Operators that compute value by value, and the layers.
#include "plan_operators.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "conv.h"
#include "elementwise.h"
#include "rows.h"
#include "workspace.h"

namespace octet {
namespace {

constexpr int64_t kChunk = 4096;
constexpr int64_t kMostPlanes = 4;  // that `interleave` takes

// fn(first, count) over [0, n), shared among threads; `cost` is what one element costs, in products.
template <class Fn>
void each_chunk(int64_t n, int64_t cost, Fn fn) {
  each_block((n + kChunk - 1) / kChunk, n * cost, [&](int64_t first, int64_t chunks, int64_t) {
    fn(first * kChunk, std::min(n, (first + chunks) * kChunk) - first * kChunk);
  });
}

}  // namespace

void expect(const PlanLine& line, bool holds, const std::string& what) {
  if (!holds) line.fail(what);
}

void expect_dtype(const PlanLine& line, const PlanView& view, bool real) {
  expect(line, view.real == real, real ? "its input is uint8, expected float32" : "its input is float32, expected uint8");
}

int32_t byte(const PlanLine& line, std::string_view name) {
  const int64_t value = line.integer(name);
  expect(line, value >= 0 && value <= 255, std::string(name) + " is " + std::to_string(value) + ", expected 0 to 255");
  return static_cast<int32_t>(value);
}

int64_t dimension(const PlanLine& line, int64_t dim, int64_t rank) {
  const int64_t found = dim < 0 ? dim + rank : dim;
  if (found < 0 || found >= rank)
    line.fail("dimension " + std::to_string(dim) + " of a tensor of " + std::to_string(rank) + " dimensions");
  return found;
}

PlanView looked_up(PlanBuilder& b, const PlanView& source, std::shared_ptr<std::vector<uint8_t>> table) {
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

// Channels that lie apart, as images come, each rounded as a row and then put side by side.
void quantize_planes(PlanBuilder& b, const PlanView& x, RowRange range, const PlanView& out) {
  const int64_t channels = x.sizes[1], pixels = product(Sizes(x.sizes.begin() + 2, x.sizes.end()));
  const int64_t parts = (pixels + kChunk - 1) / kChunk;
  b.emit({&x}, out, [=, batch = x.sizes[0]](const PlanFrame& frame) {
    each_block(batch * parts, x.count() * 4, [&](int64_t first, int64_t count, int64_t) {
      uint8_t rows[kMostPlanes * kChunk];
      for (int64_t part = first; part < first + count; ++part) {
        const int64_t begin = part % parts * kChunk, n = std::min(kChunk, pixels - begin), sample = part / parts * channels;
        for (int64_t c = 0; c < channels; ++c)
          row_kernels().quantize(x.reals(frame) + (sample + c) * pixels + begin, nullptr, n, range, 255, rows + c * kChunk,
                                 nullptr);
        element_kernels().interleave(rows, kChunk, channels, n, out.bytes_out(frame) + sample * pixels + begin * channels);
      }
    });
  });
}

}  // namespace

PlanView quantized(PlanBuilder& b, const PlanLine& line, const PlanView& x) {
  expect_dtype(line, x, true);
  const PlanView out = b.fresh(x.sizes, b.rounded_strides(line, x.sizes));
  const RowRange range{static_cast<float>(line.number("scale")), byte(line, "zero_point")};
  // What a linear layer reads is plain (`rounded_strides`), and sequences of few steps look like images of few channels.
  const bool planes = x.has_strides(plain_strides(x.sizes)) && out.has_strides(channels_last_strides(x.sizes));
  if (x.rank() >= 3 && x.sizes[1] >= 2 && x.sizes[1] <= kMostPlanes && planes) {
    quantize_planes(b, x, range, out);
    return out;
  }
  // Rows as the reals lie, so that they are read and rounded as vectors; bytes are cheap to scatter.
  const PlanLoops loops(x.sizes, {x.strides, out.strides});
  b.emit({&x}, out, [=](const PlanFrame& frame) {
    const float* from = x.reals(frame);
    uint8_t* to = out.bytes_out(frame);
    const int64_t n = loops.length(), x_step = loops.step(0), out_step = loops.step(1);
    each_block(loops.rows(), loops.rows() * n * 4, [&](int64_t first, int64_t rows, int64_t) {
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
          row_kernels().quantize(in, nullptr, part, range, 255, out_step == 1 ? q : block, nullptr);
          if (out_step != 1)
            for (int64_t j = 0; j < part; ++j) q[j * out_step] = block[j];
        }
      });
    });
  });
  return out;
}

namespace {

PlanView quantize(PlanBuilder& b, const PlanLine& line) { return quantized(b, line, b.input(line, "x")); }

PlanView dequantize(PlanBuilder& b, const PlanLine& line) {
  const PlanView q = b.dense(b.input(line, "q"));
  expect_dtype(line, q, false);
  const PlanView out = b.fresh(q.sizes, q.strides, true);
  const float scale = static_cast<float>(line.number("scale"));
  const int32_t zero_point = byte(line, "zero_point");
  b.emit({&q}, out, [=, n = q.count()](const PlanFrame& frame) {
    each_chunk(n, 2, [&](int64_t first, int64_t count) {
      row_kernels().dequantize(q.bytes(frame) + first, count, scale, zero_point, out.reals_out(frame) + first);
    });
  });
  return out;
}

// Of reals, as a layer with float output has it.
PlanView clamp(PlanBuilder& b, const PlanLine& line) {
  const PlanView x = b.dense(b.input(line, "x"));
  expect_dtype(line, x, true);
  const PlanView out = b.fresh(x.sizes, x.strides, true);
  const float low = static_cast<float>(line.number("low")), high = static_cast<float>(line.number("high"));
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

// What a weighted layer brings besides its product, in memory of its own.
struct Finish {
  std::shared_ptr<std::vector<int32_t>> bias;
  std::shared_ptr<std::vector<float>> multiplier;
  StaticOutput output;
  bool real;

  const int32_t* bias_data() const { return bias ? bias->data() : nullptr; }
  StaticOutput to(const PlanView& view, const PlanFrame& frame) const {
    StaticOutput aimed = output;
    aimed.multiplier = multiplier->data();
    if (real)
      aimed.reals = view.reals_out(frame);
    else
      aimed.quantized = view.bytes_out(frame);
    return aimed;
  }
};

Finish finish_of(const PlanLine& line, std::shared_ptr<std::vector<int32_t>> bias,
                 std::shared_ptr<std::vector<float>> multiplier) {
  expect(line, multiplier != nullptr, "has no multiplier");
  Finish finish{std::move(bias), std::move(multiplier), {}, line.op.ends_with("_f32")};
  if (!finish.real) {
    finish.output.zero_point = byte(line, "output_zero_point");
    finish.output.bottom = byte(line, "quant_min");
    finish.output.top = byte(line, "quant_max");
  }
  return finish;
}

void spread(const PlanLine& line, std::string_view name, int64_t dims, int64_t fill, int64_t (&out)[3]) {
  const Sizes given = line.integers(name);
  expect(line, static_cast<int64_t>(given.size()) == dims,
         std::string(name) + " has " + std::to_string(given.size()) + " values, expected " + std::to_string(dims));
  std::fill(out, out + 3, fill);
  std::copy(given.begin(), given.end(), out + 3 - dims);
}

// `pad`, where there is one, pads `input` besides the line's own padding.
ConvShape conv_shape(const PlanLine& line, const Sizes& input, const Sizes& weight, const PlanPad* pad) {
  const int64_t dims = static_cast<int64_t>(weight.size()) - 2;
  expect(line, dims >= 1 && dims <= 3 && input.size() == weight.size(), "input and weight differ in dimensions");
  ConvShape shape{};
  spread(line, "stride", dims, 1, shape.stride);
  spread(line, "padding", dims, 0, shape.padding);
  spread(line, "dilation", dims, 1, shape.dilation);
  shape.batch = input[0], shape.channels = input[1], shape.out_channels = weight[0], shape.groups = line.integer("groups");
  expect(line, shape.groups >= 1 && shape.channels == weight[1] * shape.groups && weight[0] % shape.groups == 0,
         "the input has " + std::to_string(shape.channels) + " channels, expected " +
             std::to_string(weight[1] * shape.groups));
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t d = axis - 3 + static_cast<int64_t>(weight.size());
    shape.in[axis] = d >= 2 ? input[d] : 1;
    shape.kernel[axis] = d >= 2 ? weight[d] : 1;
    int64_t room = shape.in[axis] + 2 * shape.padding[axis] - shape.dilation[axis] * (shape.kernel[axis] - 1);
    if (pad && d >= 2) shape.padding[axis] += pad->before[d], room += pad->before[d] + pad->after[d];
    expect(line, room >= 1 && shape.stride[axis] > 0, "the kernel does not fit the padded input");
    shape.out[axis] = (room - 1) / shape.stride[axis] + 1;
  }
  return shape;
}

AddSettings add_settings(const PlanLine& line) {
  return {byte(line, "a_zero_point"),
          byte(line, "b_zero_point"),
          static_cast<float>(line.number("a_multiplier")),
          static_cast<float>(line.number("b_multiplier")),
          byte(line, "output_zero_point"),
          byte(line, "quant_min"),
          byte(line, "quant_max")};
}

// The sum that is all that becomes of a layer's outputs, where it can be taken with them: the other side is there, and lies
// as they do.
struct Sum {
  const PlanLine* line = nullptr;
  PlanView other;
  Residual residual{};
};

Sum sum_after(const PlanBuilder& b, const PlanLine& line, const PlanView& out) {
  const PlanLine* reader = out.real ? nullptr : b.only_reader(line.out);
  if (!reader || reader->op != "add") return {};
  const bool first = reader->reg("q_a") == line.out;
  const PlanView* other = b.known(reader->reg(first ? "q_b" : "q_a"));
  if (!other || other->real || other->sizes != out.sizes || !other->has_strides(out.strides)) return {};
  return {reader, *other, {add_settings(*reader), nullptr, first}};
}

PlanView conv(PlanBuilder& b, const PlanLine& line) {
  const int32_t zero_point = byte(line, "zero_point");
  const PlanPad* pad = b.pad(line.reg("q_x"));
  if (pad && (!pad->spatial() || pad->fill != zero_point)) pad = nullptr;
  const PlanView x = b.channels_last(pad ? pad->source : b.input(line, "q_x"));
  expect_dtype(line, x, false);
  const PlanConstant& weight = b.constant(line, "q_weight", "int8", x.sizes.size());
  const ConvShape shape = conv_shape(line, x.sizes, weight.sizes, pad);
  const Finish finish = finish_of(line, b.values<int32_t>(line, "q_bias", "int32", shape.out_channels),
                                  b.values<float>(line, "multiplier", "float32", shape.out_channels));
  Sizes sizes{shape.batch, shape.out_channels};
  sizes.insert(sizes.end(), shape.out + 5 - x.rank(), shape.out + 3);
  const PlanView out = b.fresh(sizes, channels_last_strides(sizes), finish.real);
  const Sum sum = sum_after(b, line, out);
  if (sum.line) b.define(*sum.line, out);
  std::vector<const PlanView*> reads{&x};
  if (sum.line) reads.push_back(&sum.other);
  const auto emit = [&](auto compute) {
    b.emit(reads, out, [=](const PlanFrame& frame) {
      StaticOutput output = finish.to(out, frame);
      Residual residual = sum.residual;
      if (sum.line) residual.other = sum.other.bytes(frame), output.residual = &residual;
      compute(x.bytes(frame), output);
    });
    return out;
  };
  if (!finish.real && PackedWinograd::serves(shape))
    if (const auto winograd = weight.pack_winograd(); winograd && winograd->data())
      return emit([=](const uint8_t* q_x, const StaticOutput& output) {
        conv_winograd(shape, *winograd, q_x, zero_point, finish.bias_data(), output);
      });
  std::vector<std::shared_ptr<const PackedGemm>> groups;
  std::shared_ptr<const PackedDepthwise> depthwise;
  if (shape.depthwise())
    depthwise = weight.pack_depthwise();
  else
    for (int64_t g = 0; g < shape.groups; ++g) groups.push_back(weight.pack(g, shape.groups));
  return emit([=](const uint8_t* q_x, const StaticOutput& output) {
    conv_static(shape, groups, depthwise.get(), q_x, zero_point, finish.bias_data(), output);
  });
}

PlanView linear(PlanBuilder& b, const PlanLine& line) {
  const PlanView x = b.plain(b.input(line, "q_x"));
  expect_dtype(line, x, false);
  const PlanConstant& weight = b.constant(line, "q_weight", "int8", 2);
  expect(line, x.rank() >= 1 && x.sizes.back() == weight.sizes[1],
         "the input has " + std::to_string(x.rank() ? x.sizes.back() : 0) + " features, expected " +
             std::to_string(weight.sizes[1]));
  const Finish finish = finish_of(line, b.values<int32_t>(line, "q_bias", "int32", weight.sizes[0]),
                                  b.values<float>(line, "multiplier", "float32", weight.sizes[0]));
  const std::shared_ptr<const PackedGemm> gemm = weight.pack(0, 0);
  Sizes sizes = x.sizes;
  sizes.back() = weight.sizes[0];
  const PlanView out = b.fresh(sizes, plain_strides(sizes), finish.real);
  const int32_t zero_point = byte(line, "zero_point");
  sizes.pop_back();
  b.emit({&x}, out, [=, rows = product(sizes)](const PlanFrame& frame) {
    if (rows) linear_static(*gemm, x.bytes(frame), zero_point, rows, finish.bias_data(), finish.to(out, frame));
  });
  return out;
}

PlanView lookup(PlanBuilder& b, const PlanLine& line) {
  PlanView x = b.input(line, "q");
  expect_dtype(line, x, false);
  const PlanConstant& found = b.constant(line, "table", "uint8");
  const uint8_t* first = static_cast<const uint8_t*>(found.data);
  auto table = std::make_shared<std::vector<uint8_t>>(first, first + product(found.sizes));
  expect(line, !found.sizes.empty() && found.sizes.back() == 256, "its table has no 256 entries");
  if (found.sizes.size() == 1) return looked_up(b, x, table);
  const int64_t axis = dimension(line, line.integer("axis"), x.rank()), channels = found.sizes[0];
  expect(line, x.sizes[axis] == channels, "its table is for " + std::to_string(channels) + " channels");
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

}  // namespace

Sizes broadcast(const PlanLine& line, PlanView& left, PlanView& right) {
  const size_t rank = std::max(left.sizes.size(), right.sizes.size());
  for (PlanView* view : {&left, &right}) {
    const size_t missing = rank - view->sizes.size();
    view->sizes.insert(view->sizes.begin(), missing, 1);
    view->strides.insert(view->strides.begin(), missing, 1);
  }
  Sizes sizes(rank);
  for (size_t d = 0; d < rank; ++d) {
    expect(line, left.sizes[d] == right.sizes[d] || left.sizes[d] == 1 || right.sizes[d] == 1,
           "its inputs have shapes that do not go together");
    sizes[d] = left.sizes[d] == 1 ? right.sizes[d] : left.sizes[d];
  }
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

template <class Settings>
using BinaryKernel = void (*ElementKernels::*)(const Settings&, const uint8_t*, int, const uint8_t*, int, int64_t, uint8_t*);

template <class Settings>
PlanView binary(PlanBuilder& b, const PlanLine& line, const Settings& settings, BinaryKernel<Settings> kernel) {
  PlanView left = b.input(line, "q_a"), right = b.input(line, "q_b");
  expect_dtype(line, left, false);
  expect_dtype(line, right, false);
  const Sizes sizes = broadcast(line, left, right);
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
    const auto compute = element_kernels().*kernel;
    const uint8_t *x = left.bytes(frame), *y = right.bytes(frame);
    uint8_t* to = out.bytes_out(frame);
    const int x_step = static_cast<int>(loops.step(1)), y_step = static_cast<int>(loops.step(2));
    if (loops.rows() == 1)
      return each_chunk(loops.length(), 4, [&](int64_t first, int64_t n) {
        compute(settings, x + first * x_step, x_step, y + first * y_step, y_step, n, to + first);
      });
    each_block(loops.rows(), loops.rows() * loops.length() * 4, [&](int64_t first, int64_t rows, int64_t) {
      loops.each(first, rows, [&](const int64_t* at) {
        compute(settings, x + at[1], x_step, y + at[2], y_step, loops.length(), to + at[0]);
      });
    });
  });
  return out;
}

PlanView add(PlanBuilder& b, const PlanLine& line) {
  return binary(b, line, add_settings(line), &ElementKernels::add);
}

PlanView mul(PlanBuilder& b, const PlanLine& line) {
  const MulSettings settings{byte(line, "a_zero_point"),
                             byte(line, "b_zero_point"),
                             static_cast<float>(line.number("multiplier")),
                             byte(line, "output_zero_point"),
                             byte(line, "quant_min"),
                             byte(line, "quant_max")};
  return binary(b, line, settings, &ElementKernels::mul);
}

}  // namespace

const PlanOperators& value_operators() {
  static const PlanOperators operators = {
      {"quantize", &quantize},         {"dequantize", &dequantize},       {"clamp", &clamp},
      {"conv_u8s8_u8", &conv},         {"conv_u8s8_f32", &conv},          {"linear_u8s8_u8", &linear},
      {"linear_u8s8_f32", &linear},    {"lookup", &lookup},               {"add", &add},
      {"mul", &mul},
  };
  return operators;
}

PlanView lower(PlanBuilder& b, const PlanLine& line) {
  for (const PlanOperators* table : {&value_operators(), &window_operators(), &move_operators(), &real_operators()}) {
    const auto found = table->find(line.op);
    if (found != table->end()) return found->second(b, line);
  }
  line.fail("no such operation");
}

}  // namespace octet

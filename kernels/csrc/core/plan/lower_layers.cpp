// The layers of a plan: convolutions and linear layers, with the sums that are taken along with their outputs.
#include <algorithm>
#include <cmath>

#include "core/conv/conv.h"
#include "core/plan/lower.h"

namespace octet {
namespace {

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
  for (const float one : *multiplier) expect(line, std::isfinite(one), "multiplier holds what is not finite");
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
    expect(line, shape.kernel[axis] >= 1, "its kernel is empty");
    int64_t room = shape.in[axis] + 2 * shape.padding[axis] - shape.dilation[axis] * (shape.kernel[axis] - 1);
    if (pad && d >= 2) shape.padding[axis] += pad->before[d], room += pad->before[d] + pad->after[d];
    expect(line, room >= 1 && shape.stride[axis] > 0, "the kernel does not fit the padded input");
    shape.out[axis] = (room - 1) / shape.stride[axis] + 1;
  }
  return shape;
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
  checked_count(line, sizes);
  const PlanView out = b.fresh(sizes, channels_last_strides(sizes), finish.real);
  const Sum sum = sum_after(b, line, out);
  if (sum.line) b.define(*sum.line, out);
  std::vector<const PlanView*> reads{&x};
  if (sum.line) reads.push_back(&sum.other);
  // A convolution reads its input around what it writes.
  const int over = sum.line && sum.other.buffer != x.buffer && sum.other.offset == 0 ? sum.other.buffer : -1;
  const auto emit = [&](auto compute) {
    b.emit(reads, out, [=](const PlanFrame& frame) {
      StaticOutput output = finish.to(out, frame);
      Residual residual = sum.residual;
      if (sum.line) residual.other = sum.other.bytes(frame), output.residual = &residual;
      compute(x.bytes(frame), output);
    }, over);
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
  checked_count(line, sizes);
  const PlanView out = b.fresh(sizes, plain_strides(sizes), finish.real);
  const int32_t zero_point = byte(line, "zero_point");
  sizes.pop_back();
  b.emit({&x}, out, [=, rows = product(sizes)](const PlanFrame& frame) {
    if (rows) linear_static(*gemm, x.bytes(frame), zero_point, rows, finish.bias_data(), finish.to(out, frame));
  });
  return out;
}

}  // namespace

const PlanOperators& layer_operators() {
  static const PlanOperators operators = {
      {"conv_u8s8_u8", &conv},
      {"conv_u8s8_f32", &conv},
      {"linear_u8s8_u8", &linear},
      {"linear_u8s8_f32", &linear},
  };
  return operators;
}

}  // namespace octet

// The layers of a plan: convolutions and linear layers, with the additions that are computed with their outputs.
#include <stdexcept>

#include "core/conv/conv.h"
#include "core/gemm/linear.h"
#include "core/plan/lower.h"

namespace octet {
namespace {

// A weighted layer's bias and multipliers, in memory of its own.
struct Finish {
  std::shared_ptr<const std::vector<int32_t>> bias;
  std::shared_ptr<const std::vector<float>> multiplier;
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

Finish finish_of(const PlanBuilder& b, const Operation& operation, const op::Finish& by, int64_t outputs) {
  Finish finish{b.integers(operation, by.bias, "q_bias", outputs), b.reals(operation, by.multiplier, "multiplier", outputs),
                {}, by.real};
  if (!finish.multiplier) operation.fail("has no multiplier");
  expect(operation, b.constant(operation, by.multiplier, "multiplier", "float32").finite, "multiplier holds what is not finite");
  if (!finish.real) finish.output = requantized_output(by.zero_point, by.bottom, by.top);
  return finish;
}

// The shape; `pad`, where there is one, pads `input` besides the convolution's own padding.
ConvShape shape_of(const Operation& operation, const op::Conv& conv, const Sizes& input, const Sizes& weight,
                   const PlanPad* pad) {
  ConvSettings settings{conv.stride, conv.padding, conv.dilation, conv.groups};
  if (pad) settings.before = pad->before, settings.after = pad->after;
  try {
    return conv_shape(input, weight, settings);
  } catch (const std::invalid_argument& error) {
    operation.fail(error.what());
  }
}

// An addition that is the layer's only consumer, where it can be computed with the outputs: the other operand exists, in the
// same memory order.
struct Sum {
  const Operation* operation = nullptr;
  PlanView other;
  Residual residual{};
};

Sum sum_after(const PlanBuilder& b, const Operation& operation, const op::Conv& conv, const PlanView& out) {
  if (conv.sum == kNowhere) return {};
  const Operation& reader = b.operation(conv.sum);
  const op::Add& add = *reader.as<op::Add>();
  const bool first = add.a == operation.out;
  const PlanView* other = b.known(first ? add.b : add.a);
  if (!other || other->real || other->index || other->sizes != out.sizes || !other->has_strides(out.strides)) return {};
  return {&reader, *other, {add.by, nullptr, first}};
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Conv& conv) {
  const int32_t zero_point = conv.zero_point;
  const PlanPad* pad = b.pad(conv.x);
  if (pad && (!pad->spatial() || pad->fill != zero_point)) pad = nullptr;
  const PlanView x = b.channels_last(pad ? pad->source : b.input(conv.x));
  expect_dtype(operation, x, false);
  const Sizes& weight = b.constant(operation, conv.weight, "q_weight", "int8", x.sizes.size()).sizes;
  const ConvShape shape = shape_of(operation, conv, x.sizes, weight, pad);
  const Finish finish = finish_of(b, operation, conv.finish, shape.out_channels);
  Sizes sizes{shape.batch, shape.out_channels};
  sizes.insert(sizes.end(), shape.out + 5 - x.rank(), shape.out + 3);
  checked_count(operation, sizes);
  // Reals that are given out are contiguous, and best written so at once.
  const bool apart = finish.real && conv.given_out && shape.pixels() > 0;
  const PlanView out = b.fresh(sizes, apart ? plain_strides(sizes) : channels_last_strides(sizes), finish.real);
  const Sum sum = sum_after(b, operation, conv, out);
  if (sum.operation) b.define(*sum.operation, out);
  std::vector<const PlanView*> reads{&x};
  if (sum.operation) reads.push_back(&sum.other);
  // A convolution reads its input around what it writes.
  const int over = sum.operation && sum.other.buffer != x.buffer && sum.other.offset == 0 ? sum.other.buffer : -1;
  const auto emit = [&](auto compute) {
    b.emit(reads, out, [=](const PlanFrame& frame) {
      StaticOutput output = finish.to(out, frame);
      if (apart) output.plane = shape.pixels() / shape.batch;
      Residual residual = sum.residual;
      if (sum.operation) residual.other = sum.other.bytes(frame), output.residual = &residual;
      compute(x.bytes(frame), output);
    }, over);
    return out;
  };
  if (!finish.real && PackedWinograd::serves(shape))
    if (const auto winograd = b.weights().winograd(conv.weight); winograd && winograd->data())
      return emit([=](const uint8_t* q_x, const StaticOutput& output) {
        conv_winograd(shape, *winograd, q_x, zero_point, finish.bias_data(), output);
      });
  std::vector<std::shared_ptr<const PackedGemm>> groups;
  std::shared_ptr<const PackedDepthwise> depthwise;
  if (shape.depthwise())
    depthwise = b.weights().depthwise(conv.weight);
  else
    for (int64_t g = 0; g < shape.groups; ++g) groups.push_back(b.weights().gemm(conv.weight, g, shape.groups));
  return emit([=](const uint8_t* q_x, const StaticOutput& output) {
    conv_static(shape, groups, depthwise.get(), q_x, zero_point, finish.bias_data(), output);
  });
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Linear& linear) {
  const PlanView x = b.plain(b.input(linear.x));
  expect_dtype(operation, x, false);
  const Sizes weight = product_sizes(b, operation, linear.weight, "q_weight");
  expect_or(operation, x.rank() >= 1 && x.sizes.back() == weight[1], [&] {
    return "the input has " + std::to_string(x.rank() ? x.sizes.back() : 0) + " features, expected " +
           std::to_string(weight[1]);
  });
  const Finish finish = finish_of(b, operation, linear.finish, weight[0]);
  const std::shared_ptr<const PackedGemm> gemm = b.weights().gemm(linear.weight, 0, 0);
  Sizes sizes = x.sizes;
  sizes.back() = weight[0];
  checked_count(operation, sizes);
  const PlanView out = b.fresh(sizes, plain_strides(sizes), finish.real);
  const int32_t zero_point = linear.zero_point;
  sizes.pop_back();
  b.emit({&x}, out, [=, rows = product(sizes)](const PlanFrame& frame) {
    if (rows) linear_static(*gemm, x.bytes(frame), zero_point, rows, finish.bias_data(), finish.to(out, frame));
  });
  return out;
}

Sizes product_sizes(const PlanBuilder& b, const Operation& operation, Constant weight, const char* name) {
  if (!b.is_bytes(weight)) return b.constant(operation, weight, name, "int8", 2).sizes;
  const Sizes& stored = b.constant(operation, weight, name, "uint8", 3).sizes;
  expect_or(operation, stored[1] >= 2 && stored[1] <= 4 && stored[2] > 0 && stored[2] % 4 == 0,
            [&] { return std::string(name) + " has no shape of a weight of few bits"; });
  return {stored[0], stored[2] * 8};
}

Sizes weight_sizes(const PlanBuilder& b, const Operation& operation, Constant weight, const char* name) {
  const Sizes sizes = product_sizes(b, operation, weight, name);
  expect_or(operation, product(sizes) > 0, [&] { return std::string(name) + " is empty"; });
  return sizes;
}

std::shared_ptr<const std::vector<float>> required_reals(const PlanBuilder& b, const Operation& operation, Constant index,
                                                         const char* name, int64_t count) {
  auto values = b.reals(operation, index, name, count);
  expect_or(operation, values != nullptr, [&] { return std::string("has no ") + name; });
  return values;
}

namespace {

// A weight (n, k) of a layer with real inputs, and its scales, or null where these are by group and in the products.
struct ScaledWeight {
  std::shared_ptr<const PackedGemm> gemm;
  std::shared_ptr<const std::vector<float>> scale;
};

ScaledWeight scaled_weight(PlanBuilder& b, const Operation& operation, Constant weight, Constant scale, int64_t n, int64_t k) {
  const PreparedConstant* const scales = b.find_constant(scale);
  if (!scales || scales->sizes.size() < 2) {
    const auto values = required_reals(b, operation, scale, "scale", n);
    return {b.weights().gemm(weight, 0, 0), values};
  }
  expect(operation, b.is_bytes(weight), "its scales are by group, which a weight of bytes has not");
  expect_or(operation, scales->dtype == "float16" || scales->dtype == "float32",
            [&] { return "scale is " + scales->dtype + ", expected float16 or float32"; });
  const Sizes& sizes = scales->sizes;
  expect_or(operation,
            sizes[0] == n && sizes[1] > 0 && k % (32 * sizes[1]) == 0 && (sizes.size() == 2 || (sizes.size() == 3 && sizes[2] == 2)),
            [&] {
              return "scale has another shape than (" + std::to_string(n) + ", groups) of 32 inputs or a multiple, of " +
                     std::to_string(k) + ", with no or 2 values a group";
            });
  return {b.weights().grouped(weight, scale), nullptr};
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::DynamicLinear& by) {
  const PlanView x = b.plain(real_input(b, operation, by.x));
  const Sizes weight = weight_sizes(b, operation, by.weight, "q_weight");
  const int64_t n = weight[0], k = weight[1];
  expect_or(operation, x.rank() >= 1 && x.sizes.back() == k, [&] {
    return "the input has " + std::to_string(x.rank() ? x.sizes.back() : 0) + " features, expected " + std::to_string(k);
  });
  expect(operation, by.bits == 8 || by.bits == 16, "its activations have neither 8 nor 16 bits");
  const auto bias = b.reals(operation, by.bias, "bias", n), columns = b.reals(operation, by.columns, "columns", k);
  const auto [packed, scales] = scaled_weight(b, operation, by.weight, by.scale, n, k);
  Sizes sizes = x.sizes;
  sizes.back() = n;
  checked_count(operation, sizes);
  const PlanView out = b.fresh(sizes, plain_strides(sizes), true);
  sizes.pop_back();
  b.emit({&x}, out, [=, gemm = packed, scale = scales, bits = by.bits, per_row = by.per_row,
                     rows = product(sizes)](const PlanFrame& frame) {
    linear_dynamic({gemm.get(), scale ? scale->data() : nullptr, bias ? bias->data() : nullptr, columns ? columns->data() : nullptr,
                    bits, per_row, false},
                   x.reals(frame), k, rows, out.reals_out(frame));
  });
  return out;
}

}  // namespace octet

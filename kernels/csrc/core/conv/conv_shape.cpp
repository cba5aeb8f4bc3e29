#include "core/conv/conv_shape.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace octet {
namespace {

using Sizes = std::span<const int64_t>;

std::string words(Sizes sizes) {
  std::string out = "[";
  for (size_t i = 0; i < sizes.size(); ++i) out += (i ? ", " : "") + std::to_string(sizes[i]);
  return out + "]";
}

[[noreturn]] void fail(const std::string& why) { throw std::invalid_argument(why); }

// One of stride, padding, ... as three numbers, the missing first ones being `fill`.
void spread(Sizes values, size_t dims, int64_t fill, const char* name, int64_t (&out)[3]) {
  if (values.size() != dims)
    fail(std::string(name) + " has " + std::to_string(values.size()) + " values, expected " + std::to_string(dims));
  std::fill(out, out + 3, fill);
  std::copy(values.begin(), values.end(), out + 3 - dims);
}

void check_operands(Sizes input, Sizes weight, int64_t groups) {
  if (input.size() < 3 || input.size() > 5 || weight.size() != input.size())
    fail("q_x has shape " + words(input) + " and q_weight " + words(weight) +
         ", expected (batch, channels, *spatial) and (out_channels, channels / groups, *kernel) of 1 to 3 spatial dimensions");
  // Groups of nothing could be as many as anybody says.
  if (groups < 1 || (groups > 1 && (weight[0] == 0 || weight[1] == 0)) || weight[0] % groups != 0 || input[1] % groups != 0 ||
      input[1] / groups != weight[1])
    fail("q_x has " + std::to_string(input[1]) + " channels, q_weight " + words(weight) + " expects " +
         std::to_string(static_cast<uint64_t>(weight[1]) * static_cast<uint64_t>(groups)) + " in " + std::to_string(groups) +
         " groups");
}

// More than memory holds; the sum of some such sizes, and its double, are numbers still.
constexpr int64_t kMost = int64_t{1} << 40;

// The settings of an axis that has `taps` taps and, with its padding, `padded` values.
void check_axis(int64_t taps, int64_t dilation, int64_t padded, Sizes input, Sizes weight) {
  if (padded < 1 || (taps > 1 && dilation > (padded - 1) / (taps - 1)))
    fail("the kernel " + words(weight) + " does not fit the padded input " + words(input));
}

}  // namespace

ConvShape conv_shape(Sizes input, Sizes weight, const ConvSettings& settings) {
  check_operands(input, weight, settings.groups);
  const size_t dims = input.size() - 2;
  ConvShape shape{};
  spread(input.subspan(2), dims, 1, "q_x", shape.in);
  spread(weight.subspan(2), dims, 1, "q_weight", shape.kernel);
  spread(settings.stride, dims, 1, "stride", shape.stride);
  spread(settings.padding, dims, 0, "padding", shape.padding);
  spread(settings.dilation, dims, 1, "dilation", shape.dilation);
  shape.batch = input[0], shape.channels = input[1], shape.out_channels = weight[0], shape.groups = settings.groups;
  int64_t values = 1;  // of the padded input
  const auto count = [&](int64_t size) {
    if (size > kMost || __builtin_mul_overflow(values, std::max<int64_t>(size, 1), &values) || values > kMost)
      fail("the padded input " + words(input) + " would have more than 2**40 values");
  };
  count(shape.batch), count(shape.channels);
  for (size_t axis = 0; axis < 3; ++axis) {
    if (shape.stride[axis] < 1 || shape.dilation[axis] < 1 || shape.padding[axis] < 0)
      fail("stride and dilation must be positive and padding not negative");
    if (shape.kernel[axis] < 1) fail("the kernel " + words(weight) + " is empty");
    // Each alone first: their sum is a number then.
    int64_t padded = std::min(shape.in[axis], kMost + 1) + 2 * std::min(shape.padding[axis], kMost + 1);
    if (const size_t d = axis + dims - 1; axis + dims >= 3 && !settings.before.empty()) {
      shape.padding[axis] += settings.before[d];
      padded += settings.before[d] + settings.after[d];
    }
    count(padded);
    check_axis(shape.kernel[axis], shape.dilation[axis], padded, input, weight);
    const int64_t room = padded - shape.dilation[axis] * (shape.kernel[axis] - 1);
    shape.out[axis] = (room - 1) / shape.stride[axis] + 1;
    // What has no effect is not multiplied by sizes either.
    shape.stride[axis] = std::min(shape.stride[axis], room);
    if (shape.kernel[axis] == 1) shape.dilation[axis] = 1;
  }
  return shape;
}

}  // namespace octet

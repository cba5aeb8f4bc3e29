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
  if (groups < 1 || input[1] != weight[1] * groups || weight[0] % groups != 0)
    fail("q_x has " + std::to_string(input[1]) + " channels, q_weight " + words(weight) + " expects " +
         std::to_string(weight[1] * groups) + " in " + std::to_string(groups) + " groups");
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
  for (size_t axis = 0; axis < 3; ++axis) {
    if (shape.stride[axis] < 1 || shape.dilation[axis] < 1 || shape.padding[axis] < 0)
      fail("stride and dilation must be positive and padding not negative");
    if (shape.kernel[axis] < 1) fail("the kernel " + words(weight) + " is empty");
    int64_t room = shape.in[axis] + 2 * shape.padding[axis] - shape.dilation[axis] * (shape.kernel[axis] - 1);
    if (const size_t d = axis + dims - 1; axis + dims >= 3 && !settings.before.empty()) {
      shape.padding[axis] += settings.before[d];
      room += settings.before[d] + settings.after[d];
    }
    if (room < 1) fail("the kernel " + words(weight) + " does not fit the padded input " + words(input));
    shape.out[axis] = (room - 1) / shape.stride[axis] + 1;
  }
  return shape;
}

}  // namespace octet

#include "conv.h"

#include <algorithm>
#include <cstring>

#include "workspace.h"

namespace octet {
namespace {

// The input with its padding written out as the zero point, so that every tap of every pixel is a plain address.
class PaddedInput {
 public:
  PaddedInput(const ConvShape& shape, const uint8_t* q_x, int32_t zero_point) : shape_(shape), data_(q_x) {
    bool padded = false;
    for (int axis = 0; axis < 3; ++axis) {
      size_[axis] = shape.in[axis] + 2 * shape.padding[axis];
      padded |= shape.padding[axis] > 0;
    }
    if (!padded) return;
    copy_.assign(shape.batch * size_[0] * size_[1] * size_[2] * shape.channels, static_cast<uint8_t>(zero_point));
    const int64_t line = shape.in[2] * shape.channels;
    for (int64_t n = 0; n < shape.batch; ++n)
      for (int64_t d = 0; d < shape.in[0]; ++d)
        for (int64_t h = 0; h < shape.in[1]; ++h)
          std::memcpy(copy_.data() + offset(n, d + shape.padding[0], h + shape.padding[1], shape.padding[2]),
                      q_x + ((n * shape.in[0] + d) * shape.in[1] + h) * line, line);
    data_ = copy_.data();
  }

  // Bytes from a pixel's first tap to tap (d, h, w).
  int64_t tap_offset(int64_t d, int64_t h, int64_t w) const {
    return offset(0, d * shape_.dilation[0], h * shape_.dilation[1], w * shape_.dilation[2]);
  }

  // fn(i, the first tap of output pixel first + i) for i in [0, count).
  template <class Fn>
  void each_pixel(int64_t first, int64_t count, Fn fn) const {
    int64_t w = first % shape_.out[2], rest = first / shape_.out[2];
    int64_t h = rest % shape_.out[1];
    rest /= shape_.out[1];
    int64_t d = rest % shape_.out[0], n = rest / shape_.out[0];
    for (int64_t i = 0; i < count; ++i) {
      fn(i, data_ + offset(n, d * shape_.stride[0], h * shape_.stride[1], w * shape_.stride[2]));
      if (++w < shape_.out[2]) continue;
      w = 0;
      if (++h < shape_.out[1]) continue;
      h = 0;
      if (++d < shape_.out[0]) continue;
      d = 0, ++n;
    }
  }

 private:
  int64_t offset(int64_t n, int64_t d, int64_t h, int64_t w) const {
    return (((n * size_[0] + d) * size_[1] + h) * size_[2] + w) * shape_.channels;
  }

  const ConvShape& shape_;
  int64_t size_[3];
  std::vector<uint8_t> copy_;
  const uint8_t* data_;
};

// Bytes that lie side by side both in the input and in a gathered row.
struct Run {
  int64_t from, to, bytes;
};

// The copies that turn a pixel's surroundings, for group 0, into a row of the product (im2col).
std::vector<Run> runs_of(const ConvShape& shape, const PaddedInput& input) {
  const int64_t width = shape.channels / shape.groups;
  std::vector<Run> runs;
  int64_t to = 0;
  for (int64_t d = 0; d < shape.kernel[0]; ++d)
    for (int64_t h = 0; h < shape.kernel[1]; ++h)
      for (int64_t w = 0; w < shape.kernel[2]; ++w, to += width) {
        const int64_t from = input.tap_offset(d, h, w);
        if (!runs.empty() && runs.back().from + runs.back().bytes == from)
          runs.back().bytes += width;
        else
          runs.push_back({from, to, width});
      }
  return runs;
}

// Weights of a depthwise convolution as [tap][channel], and their sums.
struct Depthwise {
  std::vector<int8_t> weight;
  std::vector<int32_t> row_sums;
  std::vector<int64_t> offsets;

  Depthwise(const ConvShape& shape, const PaddedInput& input, const int8_t* by_channel)
      : weight(shape.taps() * shape.channels), row_sums(shape.channels, 0) {
    const int64_t taps = shape.taps();
    for (int64_t c = 0; c < shape.channels; ++c)
      for (int64_t tap = 0; tap < taps; ++tap) {
        weight[tap * shape.channels + c] = by_channel[c * taps + tap];
        row_sums[c] += by_channel[c * taps + tap];
      }
    for (const Run& run : runs_of(shape, input))
      for (int64_t from = run.from; from < run.from + run.bytes; ++from) offsets.push_back(from);
  }
};

}  // namespace

void conv_static(const ConvShape& shape, const std::vector<std::shared_ptr<const PackedGemm>>& groups,
                 const int8_t* weight, const uint8_t* q_x, int32_t zero_point, const int32_t* bias,
                 const StaticOutput& output) {
  const int64_t pixels = shape.pixels(), outputs = shape.out_channels, width = shape.channels / shape.groups;
  if (pixels == 0 || outputs == 0) return;
  const PaddedInput input(shape, q_x, zero_point);
  const int64_t k = shape.taps() * width, ldq = padded_row(k), group_outputs = outputs / shape.groups;

  // `products(first, rows, sums)` leaves the raw sums of output pixels [first, first + rows).
  const auto convolve = [&](const int32_t* row_sums, auto products) {
    each_block(pixels, pixels * outputs * k, [&](int64_t first, int64_t rows, int64_t) {
      int32_t* sums = output.sums ? output.sums + first * outputs : workspace().sums.get(rows * outputs);
      products(first, rows, sums);
      for (int64_t i = 0; i < rows; ++i)
        finish_row(output, sums + i * outputs, first + i, outputs, zero_point, row_sums, bias);
    });
  };
  if (shape.depthwise()) {
    const Depthwise layer(shape, input, weight);
    return convolve(layer.row_sums.data(), [&](int64_t first, int64_t rows, int32_t* sums) {
      input.each_pixel(first, rows, [&](int64_t i, const uint8_t* pixel) {
        row_kernels().depthwise(pixel, layer.offsets.data(), shape.taps(), layer.weight.data(), shape.channels,
                                sums + i * shape.channels);
      });
    });
  }
  const std::vector<Run> runs = runs_of(shape, input);
  std::vector<int32_t> row_sums;
  for (const auto& group : groups) row_sums.insert(row_sums.end(), group->row_sums(), group->row_sums() + group->n());
  convolve(row_sums.data(), [&](int64_t first, int64_t rows, int32_t* sums) {
    uint8_t* q = workspace().q.get(rows * ldq);
    for (int64_t g = 0; g < shape.groups; ++g) {
      input.each_pixel(first, rows, [&](int64_t i, const uint8_t* pixel) {
        for (const Run& run : runs) std::memcpy(q + i * ldq + run.to, pixel + g * width + run.from, run.bytes);
      });
      groups[g]->run(q, ldq, rows, sums + g * group_outputs, outputs, 0, 1);
    }
  });
}

}  // namespace octet

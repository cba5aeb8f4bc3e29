#include "core/conv/conv.h"

#include <algorithm>
#include <cstring>

#include "core/conv/conv_call.h"
#include "core/conv/conv_gather.h"
#include "core/conv/conv_image.h"
#include "core/cpu/transpose.h"
#include "core/depthwise/native_depthwise.h"
#include "core/gemm/word_rows.h"

namespace octet {
namespace {

// The input with its padding written out as the zero point, so that every tap of every pixel is a plain address.
class PaddedInput {
 public:
  // `roomy`: kSlack bytes around it are to be readable, padded or not.
  PaddedInput(const ConvShape& shape, const uint8_t* q_x, int32_t zero_point, bool roomy = false)
      : shape_(shape), data_(q_x) {
    bool padded = roomy;
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t needed = (shape.out[axis] - 1) * shape.stride[axis] + shape.dilation[axis] * (shape.kernel[axis] - 1) + 1;
      size_[axis] = std::max(shape.in[axis] + shape.padding[axis], needed);
      padded |= size_[axis] > shape.in[axis];
    }
    if (!padded) return;
    uint8_t* copy = conv_workspace().padded.get(shape.batch * size_[0] * size_[1] * size_[2] * shape.channels);
    const int64_t line = shape.in[2] * shape.channels;
    const uint8_t* from = q_x;
    int64_t filled = 0;  // up to here all is written
    for (int64_t n = 0; n < shape.batch; ++n)
      for (int64_t d = 0; d < shape.in[0]; ++d)
        for (int64_t h = 0; h < shape.in[1]; ++h, from += line) {
          const int64_t begin = offset(n, d + shape.padding[0], h + shape.padding[1], shape.padding[2]);
          std::memset(copy + filled, zero_point, begin - filled);
          if (line) std::memcpy(copy + begin, from, line);  // an image without width has no memory to copy from
          filled = begin + line;
        }
    std::memset(copy + filled, zero_point, offset(shape.batch, 0, 0, 0) - filled);
    data_ = copy;
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
    for (int64_t i = 0; i < count;) {
      const uint8_t* pixel = data_ + offset(n, d * shape_.stride[0], h * shape_.stride[1], w * shape_.stride[2]);
      const int64_t end = std::min(count, i + shape_.out[2] - w), step = shape_.stride[2] * shape_.channels;
      for (; i < end; ++i, pixel += step) fn(i, pixel);
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
  const uint8_t* data_;
};

std::vector<int32_t> all_row_sums(const std::vector<std::shared_ptr<const PackedGemm>>& groups) {
  std::vector<int32_t> all;
  for (const auto& group : groups) all.insert(all.end(), group->row_sums(), group->row_sums() + group->n());
  return all;
}

// Whether the pixels of the input are the rows of the product, one after the other.
bool has_pixels_as_rows(const ConvCall& call) {
  bool plain = call.shape.groups == 1 && call.shape.taps() == 1 && call.shape.channels > 0;
  for (int axis = 0; axis < 3; ++axis) plain &= call.shape.stride[axis] == 1 && call.shape.in[axis] == call.shape.out[axis];
  return plain;
}

// Whether they are so as they lie.
bool is_product(const ConvCall& call) { return has_pixels_as_rows(call) && call.shape.channels % 4 == 0; }

// The rows of the kernel as they lie in the image, and nothing gathered.
void convolve_in_place(const ConvCall& call, const PackedGemm& gemm) {
  const ConvShape& shape = call.shape;
  const int64_t bytes = shape.kernel[2] * shape.channels;
  const PaddedInput input(shape, call.q_x, call.zero_point, bytes % kPieceStep != 0);
  std::vector<int64_t> starts;
  for (int64_t d = 0; d < shape.kernel[0]; ++d)
    for (int64_t h = 0; h < shape.kernel[1]; ++h) starts.push_back(input.tap_offset(d, h, 0));
  const Pieces pieces{starts.data(), static_cast<int64_t>(starts.size()), bytes};
  const Requantize by = requantize_of(call, gemm.row_sums());
  each_part(shape.pixels(), call.products(), [&](int64_t first, int64_t rows) {
    const uint8_t** begins = conv_workspace().begins.get(rows);
    input.each_pixel(first, rows, [&](int64_t i, const uint8_t* pixel) { begins[i] = pixel; });
    leave(call, first, rows, 0, shape.out_channels, [&](uint8_t* to) {
      gemm.run_pieces_u8(begins, pieces, rows, by, to, shape.out_channels);
    });
  });
}

// The pixels of the input as they lie, all in one call.
void convolve_whole(const ConvCall& call, const PackedGemm& gemm) {
  const int64_t pixels = call.shape.pixels(), k = gemm.k(), n = gemm.n();
  const Requantize by = requantize_of(call, gemm.row_sums());
  each_share(pixels, call.products(), pixels, outputs_are_shared(gemm, call.products()),
             [&](int64_t first, int64_t rows, int part, int parts) {
               leave_added(call, by, first, [&](const Requantize& added, uint8_t* to) {
                 gemm.run_u8(call.q_x + first * k, k, rows, added, to, n, part, parts);
               });
             });
}

// The inputs of a group's product, a row for each output pixel: the pixels of the input as they lie, copied, or gathered.
class ProductRows {
 public:
  // `words`: the product reads rows by words and no further, so that they need not lie 64 bytes apart.
  ProductRows(const ConvCall& call, bool words)
      : call_(call), lie_there_(words && is_product(call)), copied_(words && has_pixels_as_rows(call)),
        gather_(call.shape, call.q_x, call.zero_point),
        ldq_(copied_ ? word_row(call.shape.channels) : padded_row(call.shape.k())) {}

  int64_t ldq() const { return ldq_; }

  // Those of output pixels [first, first + rows), until others are asked for.
  const uint8_t* of(int64_t group, int64_t first, int64_t rows) const {
    if (lie_there_) return call_.q_x + first * ldq_;
    uint8_t* own = workspace().q.get(rows * ldq_);
    if (copied_)
      copy_to_words(call_.q_x + first * call_.shape.channels, call_.shape.channels, rows, own);
    else
      gather_.rows(group, first, rows, own, ldq_);
    return own;
  }

 private:
  const ConvCall& call_;
  const bool lie_there_, copied_;
  Gather gather_;
  int64_t ldq_;
};

// Rows that are gathered and multiplied together: more where the product takes them in blocks of its own.
int64_t gathered_at_once(const ConvShape& shape, const PackedGemm& gemm) {
  constexpr int64_t kCached = 256 << 10;
  return gemm.takes_whole(shape.pixels()) ? std::max(kRowBlock, kCached / padded_row(shape.k())) : kRowBlock;
}

// One product of a convolution: some output pixels of one group, and of its outputs those of one part.
struct GroupProduct {
  const PackedGemm& gemm;
  const uint8_t* q;
  int64_t ldq, first, rows;  // output pixels [first, first + rows)
  int64_t skip, begin, end;  // the group's outputs begin at `skip`; the part's are [begin, end) of all
  Requantize by;
  int part, parts;
};

// finish(product) computes each product, `block` pixels at once, by kernels that take a tile's sums further to outputs.
template <class Finish>
void each_product(const ConvCall& call, const std::vector<std::shared_ptr<const PackedGemm>>& groups, int64_t block, Finish finish) {
  const ConvShape& shape = call.shape;
  const ProductRows inputs(call, true);
  const Requantize by = requantize_of(call, all_row_sums(groups).data());
  const int64_t width = shape.out_channels / shape.groups;
  each_share(shape.pixels(), call.products(), block, false, [&](int64_t first, int64_t rows, int part, int parts) {
    for (int64_t g = 0; g < shape.groups; ++g) {
      const PackedGemm& gemm = *groups[g];
      const int64_t skip = g * width, begin = skip + gemm.first_output(part, parts), end = skip + gemm.first_output(part + 1, parts);
      const Requantize own{by.offset + skip, by.multiplier + skip, by.zero_point, by.bottom, by.top, by.shrinks};
      finish(GroupProduct{gemm, inputs.of(g, first, rows), inputs.ldq(), first, rows, skip, begin, end, own, part, parts});
    }
  });
}

// To uint8 by kernels that requantise tile by tile.
void convolve_u8(const ConvCall& call, const std::vector<std::shared_ptr<const PackedGemm>>& groups) {
  const ConvShape& shape = call.shape;
  const bool product = is_product(call);
  if (product && adds(call) && groups[0]->takes_whole(shape.pixels())) return convolve_whole(call, *groups[0]);
  if (!product && shape.groups == 1 && serves_image(call, *groups[0])) return convolve_image(call, *groups[0]);
  // Of many channels a row is gathered by few long copies, and its product brings weights ahead of their use: at 256
  // channels and 14 x 14 in place took 255 us, gathered 219.
  const bool in_place = shape.groups == 1 && shape.dilation[2] == 1 && shape.channels < 32 && !has_pixels_as_rows(call);
  if (in_place && groups[0]->takes_pieces()) return convolve_in_place(call, *groups[0]);
  each_product(call, groups, has_pixels_as_rows(call) ? kRowBlock : gathered_at_once(shape, *groups[0]), [&](const GroupProduct& one) {
    leave(call, one.first, one.rows, one.begin, one.end, [&](uint8_t* to) {
      one.gemm.run_u8(one.q, one.ldq, one.rows, one.by, to + one.skip, shape.out_channels, one.part, one.parts);
    });
  });
}

// Channels [begin, end) of output pixels [first, first + rows), side by side at `from`, to their planes.
void spread(const ConvCall& call, const float* from, int64_t first, int64_t rows, int64_t begin, int64_t end) {
  const int64_t outputs = call.shape.out_channels, plane = call.output.plane;
  for (int64_t i = 0; i < rows;) {
    const int64_t sample = (first + i) / plane, place = (first + i) % plane, count = std::min(rows - i, plane - place);
    transpose(from + i * outputs + begin, outputs, count, end - begin,
              call.output.reals + (sample * outputs + begin) * plane + place, plane);
    i += count;
  }
}

// run(to) leaves channels [begin, end) of output pixels [first, first + rows) as reals at `to`, whose rows are those of the outputs.
template <class Run>
void leave_reals(const ConvCall& call, int64_t first, int64_t rows, int64_t begin, int64_t end, Run run) {
  const int64_t outputs = call.shape.out_channels;
  if (!call.output.plane) return run(call.output.reals + first * outputs);
  float* const own = conv_workspace().reals.get(rows * outputs);
  run(own);
  spread(call, own, first, rows, begin, end);
}

// To reals by kernels that scale tile by tile.
void convolve_f32(const ConvCall& call, const std::vector<std::shared_ptr<const PackedGemm>>& groups) {
  each_product(call, groups, kTilePixels, [&](const GroupProduct& one) {
    leave_reals(call, one.first, one.rows, one.begin, one.end, [&](float* to) {
      one.gemm.run_f32(one.q, one.ldq, one.rows, one.by, to + one.skip, call.shape.out_channels, one.part, one.parts);
    });
  });
}

// `products(first, rows, sums)` leaves the raw sums of output pixels [first, first + rows).
template <class Products>
void convolve_sums(const ConvCall& call, const int32_t* row_sums, Products products) {
  const int64_t outputs = call.shape.out_channels;
  each_part(call.shape.pixels(), call.products(), [&](int64_t first, int64_t rows) {
    int32_t* sums = call.output.sums ? call.output.sums + first * outputs : workspace().sums.get(rows * outputs);
    products(first, rows, sums);
    StaticOutput block = call.output;
    const auto finish = [&] {
      for (int64_t i = 0; i < rows; ++i)
        finish_row(block, sums + i * outputs, i, outputs, call.zero_point, row_sums, call.bias);
    };
    if (block.reals)
      return leave_reals(call, first, rows, 0, outputs, [&](float* to) { block.reals = to, finish(); });
    leave(call, first, rows, 0, outputs, [&](uint8_t* to) { block.quantized = to, finish(); });
  });
}

void convolve(const ConvCall& call, const std::vector<std::shared_ptr<const PackedGemm>>& groups) {
  const ConvShape& shape = call.shape;
  const ProductRows inputs(call, false);
  const int64_t width = shape.out_channels / shape.groups;
  convolve_sums(call, all_row_sums(groups).data(), [&](int64_t first, int64_t rows, int32_t* sums) {
    for (int64_t g = 0; g < shape.groups; ++g)
      groups[g]->run(inputs.of(g, first, rows), inputs.ldq(), rows, sums + g * width, shape.out_channels, 0, 1);
  });
}

// Whether the vector kernels compute it: they take all planes one after the other, and columns side by side.
bool serves_rows(const ConvShape& shape) { return shape.in_planes() && shape.in[0] == shape.out[0] && shape.dilation[2] == 1; }

// The rows of input that the kernel sees at once, as NativeDepthwise::row wants them, with padding around.
class PlacedRows {
 public:
  PlacedRows(const ConvCall& call, const NativeDepthwise& kernel) : call_(call), kernel_(kernel) {
    const ConvShape& shape = call.shape;
    columns_ = (shape.out[2] - 1) * shape.stride[2] + shape.kernel[2];
    bytes_ = columns_ * kernel.placed_bytes(shape.channels);
    span_ = (shape.kernel[1] - 1) * shape.dilation[1] + 1;
    // One row more, which stays padding. Vectors of several pixels read on past the last one.
    base_ = conv_workspace().placed.get((span_ + 1) * bytes_ + shape.stride[2] * kSlack);
    std::memset(base_ + span_ * bytes_, call.zero_point, bytes_);
  }

  int64_t columns() const { return columns_; }

  // Those under a row of output pixels; rows of a plane must be asked for in order.
  void find(int64_t plane, int64_t row, const uint8_t** rows) {
    const ConvShape& shape = call_.shape;
    const int64_t top = row * shape.stride[1] - shape.padding[1];
    next_ = plane == plane_ ? std::max(next_, top) : std::max<int64_t>(top, 0);
    plane_ = plane;
    for (; next_ < std::min(top + span_, shape.in[1]); ++next_)
      if (next_ >= 0) place(next_);
    for (int64_t tap = 0; tap < shape.kernel[1]; ++tap) {
      const int64_t h = top + tap * shape.dilation[1];
      rows[tap] = base_ + (h < 0 || h >= shape.in[1] ? span_ : h % span_) * bytes_;
    }
  }

 private:
  void place(int64_t h) const {
    const ConvShape& shape = call_.shape;
    const int64_t first = std::min(shape.padding[2], columns_), count = std::min(shape.in[2], columns_ - first);
    kernel_.place(call_.q_x + (plane_ * shape.in[1] + h) * shape.in[2] * shape.channels, count, shape.channels, first,
                  columns_, static_cast<uint8_t>(call_.zero_point), base_ + h % span_ * bytes_);
  }

  const ConvCall& call_;
  const NativeDepthwise& kernel_;
  int64_t columns_, bytes_, span_, plane_ = -1, next_ = 0;
  uint8_t* base_;
};

// Whether every sum times its multiplier fits int32, whatever the input. |sum| <= taps * 255 * 128 + |offset|.
bool fits_int32(const Requantize& by, int64_t channels, int64_t taps) {
  int32_t low = 0, high = 0;
  for (int64_t c = 0; c < channels; ++c) {
    low = std::min(low, by.offset[c]);
    high = std::max(high, by.offset[c]);
  }
  const double offset = std::max(static_cast<double>(high), -static_cast<double>(low));
  // Less than the limit, for the roundings of the sum and of the product.
  return (static_cast<double>(taps) * 255 * 128 + offset) * largest(by.multiplier, channels) < 0.99 * 2147483648.0;
}

// By vector kernels, a row of output pixels at a time.
void depthwise_rows(const ConvCall& call, const PackedDepthwise& layer, const Requantize& plain) {
  const ConvShape& shape = call.shape;
  const NativeDepthwise& kernel = *native_depthwise();
  const int64_t lines = shape.batch * shape.out[0] * shape.out[1], arranged = kernel.arranged(shape.channels);
  int32_t* offset = conv_workspace().arranged_offset.get(arranged);
  float* multiplier = conv_workspace().arranged_multiplier.get(arranged);
  kernel.arrange(plain.offset, shape.channels, offset);
  kernel.arrange(plain.multiplier, shape.channels, multiplier);
  const Requantize by{offset, multiplier, plain.zero_point, plain.bottom, plain.top, plain.shrinks};
  each_part(lines, call.products(), [&](int64_t first, int64_t count) {
    PlacedRows input(call, kernel);
    const uint8_t* rows[kDepthwiseMost];
    for (int64_t line = first; line < first + count; ++line) {
      input.find(line / shape.out[1], line % shape.out[1], rows);
      const auto run = [&](auto row, auto* to) {
        row(rows, input.columns(), shape.out[2], shape.channels, shape.kernel[1], shape.kernel[2], shape.stride[2], layer.native(), by, to);
      };
      const int64_t pixel = line * shape.out[2];
      if (call.output.reals)
        leave_reals(call, pixel, shape.out[2], 0, shape.channels, [&](float* to) { run(kernel.row_reals, to); });
      else
        leave(call, pixel, shape.out[2], 0, shape.channels, [&](uint8_t* to) { run(kernel.row, to); });
    }
  });
}

void depthwise(const ConvCall& call, const PackedDepthwise& layer) {
  const ConvShape& shape = call.shape;
  const PaddedInput input(shape, call.q_x, call.zero_point);
  std::vector<int64_t> offsets;
  for (int64_t d = 0; d < shape.kernel[0]; ++d)
    for (int64_t h = 0; h < shape.kernel[1]; ++h)
      for (int64_t w = 0; w < shape.kernel[2]; ++w) offsets.push_back(input.tap_offset(d, h, w));
  convolve_sums(call, layer.row_sums(), [&](int64_t first, int64_t rows, int32_t* sums) {
    input.each_pixel(first, rows, [&](int64_t i, const uint8_t* pixel) {
      row_kernels().depthwise(pixel, offsets.data(), shape.taps(), layer.by_tap(), shape.channels,
                              sums + i * shape.channels);
    });
  });
}

}  // namespace

std::vector<int8_t> kernel_rows(const int8_t* weight, int64_t n, int64_t channels, int64_t rows, int64_t width,
                                int64_t groups) {
  const int64_t filled = packed_kernel_row(width, channels, groups), plane = rows * width;
  if (plane == 1 && filled == channels) return {weight, weight + n * channels};
  std::vector<int8_t> packed(n * rows * filled, 0);
  for (int64_t j = 0; j < n; ++j, weight += channels * plane)
    for (int64_t row = 0; row < rows; ++row)
      transpose(weight + row * width, plane, channels, width, packed.data() + (j * rows + row) * filled, channels);
  return packed;
}

PackedDepthwise::PackedDepthwise(const int8_t* weight, int64_t channels, const int64_t (&kernel)[3])
    : by_tap_(channels * kernel[0] * kernel[1] * kernel[2]), row_sums_(channels, 0) {
  const int64_t taps = kernel[0] * kernel[1] * kernel[2];
  check_products(taps);
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t tap = 0; tap < taps; ++tap) {
      by_tap_[tap * channels + c] = weight[c * taps + tap];
      row_sums_[c] += weight[c * taps + tap];
    }
  const NativeDepthwise* table = native_depthwise();
  if (!table || kernel[0] != 1 || kernel[1] > kDepthwiseMost) return;
  packed_bytes_ = table->packed_bytes(channels, kernel[1], kernel[2]);
  int8_t* packed = packed_.get(packed_bytes_);
  table->pack(weight, channels, kernel[1], kernel[2], packed);
  native_ = packed;
}

int64_t PackedDepthwise::bytes() const {
  return packed_bytes_ + static_cast<int64_t>(by_tap_.size() + row_sums_.size() * sizeof(int32_t));
}

void conv_static(const ConvShape& shape, const std::vector<std::shared_ptr<const PackedGemm>>& groups,
                 const PackedDepthwise* layer, const uint8_t* q_x, int32_t zero_point, const int32_t* bias,
                 const StaticOutput& output) {
  if (shape.pixels() == 0 || shape.out_channels == 0) return;
  const ConvCall call{shape, q_x, zero_point, bias, output};
  if (shape.depthwise()) {
    if (layer->native() && serves_rows(shape) && !output.sums) {
      const Requantize by = requantize_of(call, layer->row_sums());
      if (output.reals || fits_int32(by, shape.channels, shape.taps())) return depthwise_rows(call, *layer, by);
    }
    return depthwise(call, *layer);
  }
  const bool direct = shape.k() > 0 && std::all_of(groups.begin(), groups.end(), [](const auto& g) { return g->requantizes(); });
  if (!direct || output.sums) return convolve(call, groups);
  return output.quantized ? convolve_u8(call, groups) : convolve_f32(call, groups);
}

}  // namespace octet

#include "core/conv/conv_image.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace octet {
namespace {

// Bytes of lines with their padding that are read again from a core's own caches, and of a weight that is not: all of a plane goes
// past it.
constexpr int64_t kCachedLines = 512 << 10, kCachedWeight = 768 << 10;

// Where the pixels of a plane's lines lie that a kernel sees, and each line's bytes.
class Lines {
 public:
  explicit Lines(const ConvShape& shape)
      : shape_(shape),
        width_((shape.out[2] - 1) * shape.stride[2] + (shape.kernel[2] - 1) * shape.dilation[2] + 1),
        // Pieces that are no whole steps are read on to the end of one, which only a copy has room for.
        whole_(shape.padding[2] == 0 && width_ <= shape.in[2] && shape.row_bytes() % kPieceStep == 0 &&
               shape.row_bytes() == shape.kernel[2] * shape.channels) {
    const int64_t joined = shape.dilation[2] == 1 ? 1 : shape.kernel[2];
    for (int64_t h = 0; h < shape.kernel[1]; ++h)
      for (int64_t w = 0; w < joined; ++w)
        starts_.push_back(h * shape.dilation[1] * bytes() + w * shape.dilation[2] * shape.channels);
    pieces_ = {starts_.data(), static_cast<int64_t>(starts_.size()), shape.kernel[2] / joined * shape.channels};
  }
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  // Of a line, with the padding that it needs.
  int64_t bytes() const { return (whole_ ? shape_.in[2] : width_) * shape_.channels; }

  // The rows of output lines [first, first + lines) of a plane, with padding written out where there is some.
  ImageRows rows(const uint8_t* plane, int64_t first, int64_t lines, int zero_point) const {
    const int64_t top = first * shape_.stride[1] - shape_.padding[1];
    const int64_t count = (lines - 1) * shape_.stride[1] + (shape_.kernel[1] - 1) * shape_.dilation[1] + 1;
    const bool inside = whole_ && top >= 0 && top + count <= shape_.in[1];
    return at(inside ? plane + top * bytes() : padded(plane, top, count, zero_point), lines);
  }
  ImageRows at(const uint8_t* first, int64_t lines) const {
    return {first, lines, shape_.stride[1] * bytes(), shape_.out[2], shape_.stride[2] * shape_.channels, pieces_};
  }

 private:
  const uint8_t* padded(const uint8_t* plane, int64_t top, int64_t count, int zero_point) const {
    const int64_t size = bytes(), left = std::min(size, shape_.padding[2] * shape_.channels);
    const int64_t line = shape_.in[2] * shape_.channels, filled = std::min(line, size - left);
    uint8_t* const copy = conv_workspace().padded.get(count * size);
    uint8_t* to = copy;
    for (int64_t y = top; y < top + count; ++y, to += size) {
      if (y < 0 || y >= shape_.in[1]) {
        std::memset(to, zero_point, size);
        continue;
      }
      std::memset(to, zero_point, left);
      std::memcpy(to + left, plane + y * line, filled);
      std::memset(to + left + filled, zero_point, size - left - filled);
    }
    return copy;
  }

  const ConvShape& shape_;
  const int64_t width_;
  const bool whole_;
  std::vector<int64_t> starts_;
  Pieces pieces_;
};

int64_t lines_at_once(const ConvShape& shape, const Lines& lines, const PackedGemm& gemm) {
  if (gemm.n() * gemm.k() > kCachedWeight) return shape.out[1];
  return std::clamp<int64_t>(kCachedLines / (lines.bytes() * shape.stride[1]), 1, shape.out[1]);
}

}  // namespace

bool serves_image(const ConvCall& call, const PackedGemm& gemm) {
  if (!adds(call) || !call.shape.in_planes() || (call.shape.dilation[2] > 1 && call.shape.channels % kPieceStep)) return false;
  return gemm.serves_image(Lines(call.shape).at(call.q_x, call.shape.out[1]));
}

void convolve_image(const ConvCall& call, const PackedGemm& gemm) {
  const ConvShape& shape = call.shape;
  const Lines lines(shape);
  const Requantize by = requantize_of(call, gemm.row_sums());
  const int64_t most = lines_at_once(shape, lines, gemm), count = shape.batch * shape.out[0] * shape.out[1];
  const bool wide = outputs_are_shared(gemm, call.products());
  each_share(count, call.products(), count, wide, [&](int64_t line, int64_t left, int part, int parts) {
    for (int64_t taken; left > 0; line += taken, left -= taken) {
      const int64_t plane = line / shape.out[1], first = line % shape.out[1];
      taken = std::min({left, most, shape.out[1] - first});
      const int64_t in = plane / shape.out[0] * shape.in[0] + plane % shape.out[0] * shape.stride[0];
      const ImageRows rows = lines.rows(call.q_x + in * shape.in[1] * shape.in[2] * shape.channels, first, taken, call.zero_point);
      leave_added(call, by, line * shape.out[2], [&](const Requantize& added, uint8_t* to) {
        gemm.run_image_u8(rows, added, to, shape.out_channels, part, parts);
      });
    }
  });
}

}  // namespace octet

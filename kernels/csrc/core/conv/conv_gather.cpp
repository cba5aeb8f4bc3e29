#include "core/conv/conv_gather.h"

#include <algorithm>
#include <cstring>

namespace octet {

Gather::Gather(const ConvShape& shape, const uint8_t* q_x, int32_t zero_point)
    : shape_(shape),
      q_x_(q_x),
      end_(q_x + shape.batch * shape.in[0] * shape.in[1] * shape.in[2] * shape.channels),
      zero_point_(zero_point),
      width_(shape.channels / shape.groups),
      whole_(shape.groups == 1 && shape.dilation[2] == 1) {}

void Gather::rows(int64_t group, int64_t first, int64_t count, uint8_t* q, int64_t ldq) const {
  const ConvShape& s = shape_;
  const uint8_t* const from = q_x_ + group * width_;
  for (int64_t pixel = first; pixel < first + count; ++pixel, q += ldq) {
    int64_t rest = pixel / s.out[2];
    const int64_t x = pixel % s.out[2] * s.stride[2] - s.padding[2], y = rest % s.out[1] * s.stride[1] - s.padding[1];
    rest /= s.out[1];
    const int64_t z = rest % s.out[0] * s.stride[0] - s.padding[0], sample = rest / s.out[0];
    uint8_t* to = q;
    for (int64_t i = 0; i < s.kernel[0]; ++i)
      for (int64_t j = 0; j < s.kernel[1]; ++j, to += s.row_bytes()) {
        const int64_t d = z + i * s.dilation[0], h = y + j * s.dilation[1];
        const bool inside = d >= 0 && d < s.in[0] && h >= 0 && h < s.in[1];
        line(inside ? from + ((sample * s.in[0] + d) * s.in[1] + h) * s.in[2] * s.channels : nullptr, x, to);
      }
  }
}

void Gather::line(const uint8_t* line, int64_t x, uint8_t* to) const {
  const int64_t columns = shape_.kernel[2], width = shape_.in[2];
  if (!line) {
    std::memset(to, zero_point_, columns * width_);
  } else if (whole_) {
    const int64_t begin = std::clamp<int64_t>(-x, 0, columns), end = std::clamp<int64_t>(width - x, begin, columns);
    if (begin > 0) std::memset(to, zero_point_, begin * width_);
    if (end > begin) copy(to + begin * width_, line + (x + begin) * width_, (end - begin) * width_);
    if (end < columns) std::memset(to + end * width_, zero_point_, (columns - end) * width_);
  } else {
    for (int64_t c = 0; c < columns; ++c, x += shape_.dilation[2], to += width_) {
      if (x >= 0 && x < width)
        copy(to, line + x * shape_.channels, width_);
      else
        std::memset(to, zero_point_, width_);
    }
  }
}

// Past its end too where the image goes on: short copies are most of the time of a layer with few channels.
void Gather::copy(uint8_t* to, const uint8_t* from, int64_t bytes) const {
  if (bytes > 64 || end_ - from < 64) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (int64_t i = 0; i < bytes; i += 16) std::memcpy(to + i, from + i, 16);
}

}  // namespace octet

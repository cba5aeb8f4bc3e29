// Rows of the product of a convolution, copied together from around each output pixel (im2col). The image is read as it
// lies: a copy with padding around it would be written by one thread and read by all.
#pragma once

#include "core/conv/conv.h"

namespace octet {

class Gather {
 public:
  // `k` bytes a row, `ConvShape::k()`.
  Gather(const ConvShape& shape, const uint8_t* q_x, int32_t zero_point);
  // Rows of group `group` for output pixels [first, first + count), `ldq` bytes apart. Up to 15 bytes past each are written.
  void rows(int64_t group, int64_t first, int64_t count, uint8_t* q, int64_t ldq) const;

 private:
  // What the kernel's columns see of a line of the image, from column x on; null is padding.
  void line(const uint8_t* line, int64_t x, uint8_t* to) const;
  void copy(uint8_t* to, const uint8_t* from, int64_t bytes) const;

  const ConvShape& shape_;
  const uint8_t *q_x_, *end_;
  const int zero_point_;
  const int64_t width_;  // of a group, in channels
  const bool whole_;     // columns lie side by side in the image as they do in a row
};

}  // namespace octet

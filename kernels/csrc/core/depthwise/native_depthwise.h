// Our own depthwise kernels, one table per instruction set.
#pragma once

#include <cstdint>

#include "core/rows/requantize.h"

namespace octet {

// Depthwise convolutions, requantised from registers. Their input lies in rows of their own, with room for a vector past
// their end: blocks of channels, and in each the columns of the row side by side.
struct NativeDepthwise {
  // Bytes of a column in all blocks together.
  int64_t (*placed_bytes)(int64_t channels);
  // Pixels (count, channels) to the columns [first, first + count) of a row with `columns` columns, `border` to the others.
  void (*place)(const uint8_t* pixels, int64_t count, int64_t channels, int64_t first, int64_t columns, uint8_t border,
                uint8_t* row);
  int64_t (*packed_bytes)(int64_t channels, int64_t height, int64_t width);
  // weight (channels, height, width); packed is aligned to 64 bytes.
  void (*pack)(const int8_t* weight, int64_t channels, int64_t height, int64_t width, int8_t* packed);
  // Values of 4 bytes per channel in the order of the kernel's registers, and how many there are.
  int64_t (*arranged)(int64_t channels);
  void (*arrange)(const void* by_channel, int64_t channels, void* out);
  // A row of output pixels (pixels, channels) from `height` rows with `columns` columns; the first pixel sees the first
  // `width` of them. height <= kDepthwiseMost. offset and multiplier of `by` are arranged, and no sum times its multiplier
  // leaves int32.
  void (*row)(const uint8_t* const* rows, int64_t columns, int64_t pixels, int64_t channels, int64_t height, int64_t width,
              int64_t stride, const int8_t* packed, const Requantize& by, uint8_t* out);
  // The same, as reals: each sum times its multiplier.
  void (*row_reals)(const uint8_t* const* rows, int64_t columns, int64_t pixels, int64_t channels, int64_t height, int64_t width,
                    int64_t stride, const int8_t* packed, const Requantize& by, float* out);
};

constexpr int64_t kDepthwiseMost = 32;

// The kernel for this CPU, or null.
const NativeDepthwise* native_depthwise();

}  // namespace octet

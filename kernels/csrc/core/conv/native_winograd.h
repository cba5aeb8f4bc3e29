// Our own Winograd kernels, one table per instruction set.
#pragma once

#include <cstdint>

#include "core/rows/requantize.h"

namespace octet {

// A tile of 4 x 4 pixels that Winograd's kernels compute at once.
struct WinogradTile {
  const uint8_t* in[36];  // the pixels around, 6 x 6
  uint8_t* out[4];        // the first pixel of each row; the next ones lie behind it
  int height, width;      // of what is inside the image
};

// 3 x 3 convolutions of stride 1 by Winograd's algorithm, exact for weights that PackedWinograd takes.
struct NativeWinograd {
  int64_t channels;  // are a multiple of this
  int64_t (*packed_bytes)(int64_t outputs, int64_t channels);
  // weight (outputs, channels, 3, 3)
  void (*pack)(const int8_t* weight, int64_t outputs, int64_t channels, int8_t* packed);
  int64_t (*scratch_bytes)(int64_t tiles, int64_t channels);
  // out has row stride `outputs`; scratch is aligned to 64 bytes.
  void (*run)(const WinogradTile* tiles, int64_t count, int64_t channels, const int8_t* packed, int64_t outputs,
              const Requantize& by, void* scratch);
};

// The kernel for this CPU, or null.
const NativeWinograd* native_winograd();

}  // namespace octet

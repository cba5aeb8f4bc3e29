// Buffers of the calling thread for convolutions, besides those of a product.
#pragma once

#include <cstdint>

#include "core/conv/native_winograd.h"
#include "core/cpu/of_thread.h"
#include "core/cpu/scratch.h"

namespace octet {

struct ConvWorkspace {
  Scratch<uint8_t> unsummed;  // outputs that a residual is yet to be added to
  Scratch<float> reals;       // outputs that are yet to be spread among planes
  // The padded input, and where the rows of the product begin in it.
  Scratch<uint8_t> padded;
  Scratch<const uint8_t*> begins;
  // Of a depthwise convolution: the rows that its kernel sees, and what requantises, in the order of the kernel.
  Scratch<uint8_t> placed;
  Scratch<int32_t> arranged_offset;
  Scratch<float> arranged_multiplier;
  // Of Winograd's algorithm: its tiles, their matrices, and a pixel of padding.
  Scratch<WinogradTile> tiles;
  Scratch<uint8_t> winograd, border;
};

inline ConvWorkspace& conv_workspace() {
  thread_local ConvWorkspace* own = nullptr;
  return of_thread(own);
}

}  // namespace octet

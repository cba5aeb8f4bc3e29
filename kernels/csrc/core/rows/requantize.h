// Requantisation of a product's sums to bytes, and the memory layout of rows of activations. Plain structures: the files of all
// instruction sets include this, and shared code must not be code that two of them would compile differently.
#pragma once

#include <cstdint>

#include "core/rows/elementwise.h"

namespace octet {

// Equation 7, with what equation 6 adds to the raw sums of a channel in one number. Both arrays have room for a whole
// vector past their end.
struct Requantize {
  const int32_t* offset;    // bias - input zero point * row_sum
  const float* multiplier;
  int32_t zero_point, bottom, top;
  bool shrinks = false;  // every multiplier is below 1, so that no sum times its own leaves int32
  const Residual* residual = nullptr;  // is added to the bytes, by kernels that say so
};

// How the activations of a row lie in pieces: piece i at starts[i] from where the row begins. Each is packed as a whole
// number of steps, and read to the end of its last one.
struct Pieces {
  const int64_t* starts;
  int64_t count, bytes;
};

constexpr int64_t kPieceStep = 4;

// Rows of activations that lie in an image, in pieces: `lines` lines of `width` rows, which begin `pixel` bytes apart; lines begin
// `line` bytes apart. All that lies between the first row and the end of the last one may be read.
struct ImageRows {
  const uint8_t* first;
  int64_t lines, line, width, pixel;
  Pieces pieces;
};

}  // namespace octet

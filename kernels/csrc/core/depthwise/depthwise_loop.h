// The depthwise convolution, written once over vectors of 16, 32 and 64 bytes.
//
// The products of a channel are summed over taps, and a dot product sums neighbouring bytes: so the four rows above each
// other in a column of the kernel are interleaved, channel by channel, into one 32-bit lane. Interleaving works within 128
// bits, so register b holds bytes 4 b .. 4 b + 3 of each 16; packing to bytes at the end puts them back in order.
//
// A row of input lies in blocks of channels, each with its columns side by side (`place`), so that loads are aligned and the
// last channels fill a vector too: a block of a half or a quarter of a vector holds two or four pixels there. A column is
// interleaved once for all the output pixels that see it: their sums are in registers at the same time, those of one vector
// finished and those of another begun at each step.
//
// A `Vec` says: Acc (its register), kWidth (bytes), kDotBytes (of packed weights per register and column of four rows),
// load, gather (the parts of a vector from pixels that lie apart), constant (int32 of each lane), low and high interleaving
// of 8 and 16 bits, dots (what a lane of bytes is turned into before it is multiplied), Weight, weight, kHeldWeights (that
// there are registers for), dot, pack_weight, Rounding, finish (four registers to kWidth bytes), and store, or
// store_part where the instruction set has masks; and kCentred where `dots` takes 128 from every byte.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/cpu/unroll.h"
#include "core/depthwise/native_depthwise.h"
#include "core/rows/wrapping.h"

#define OCTET_UNROLL _Pragma("GCC unroll 32")

namespace octet::depthwise {

inline int64_t quads_of(int64_t height) { return (height + 3) / 4; }

// Byte of a vector that lane `lane` of register `b` holds.
inline int64_t byte_of(int b, int lane) { return lane / 4 * 16 + b * 4 + lane % 4; }

// fn(Parts, first channel, channels) for blocks of kWidth / Parts channels. The last may have fewer than it has room for.
template <class Vec, class Fn>
inline void each_block(int64_t channels, Fn fn) {
  constexpr int64_t kWidth = Vec::kWidth;
  int64_t c = 0;
  for (; c + kWidth <= channels; c += kWidth) fn(std::integral_constant<int, 1>{}, c, kWidth);
  const int64_t rest = channels - c;
  if (rest == 0) return;
  if constexpr (kWidth == 64) {
    if (rest <= 16) return fn(std::integral_constant<int, 4>{}, c, rest);
    if (rest <= 32) return fn(std::integral_constant<int, 2>{}, c, rest);
  } else {
    if (rest <= kWidth / 2) return fn(std::integral_constant<int, 2>{}, c, rest);
  }
  fn(std::integral_constant<int, 1>{}, c, rest);
}

template <class Vec>
int64_t placed_bytes(int64_t channels) {
  int64_t bytes = 0;
  each_block<Vec>(channels, [&](auto parts, int64_t, int64_t) { bytes += Vec::kWidth / parts; });
  return bytes;
}

template <class Vec>
void place(const uint8_t* pixels, int64_t count, int64_t channels, int64_t first, int64_t columns, uint8_t border,
           uint8_t* row) {
  each_block<Vec>(channels, [&](auto parts, int64_t c, int64_t valid) {
    constexpr int64_t kBlock = Vec::kWidth / parts;
    std::memset(row, border, first * kBlock);
    uint8_t* to = row + first * kBlock;
    if (valid == kBlock)
      for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * kBlock, pixels + i * channels + c, kBlock);
    else
      for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * kBlock, pixels + i * channels + c, valid);
    std::memset(to + count * kBlock, border, (columns - first - count) * kBlock);
    row += columns * kBlock;
  });
}

template <class Vec>
int64_t packed_bytes(int64_t channels, int64_t height, int64_t width) {
  int64_t blocks = 0;
  each_block<Vec>(channels, [&](auto, int64_t, int64_t) { ++blocks; });
  return blocks * quads_of(height) * width * 4 * Vec::kDotBytes;
}

template <class Vec>
void pack(const int8_t* weight, int64_t channels, int64_t height, int64_t width, int8_t* packed) {
  each_block<Vec>(channels, [&](auto parts, int64_t first, int64_t valid) {
    for (int64_t q = 0; q < quads_of(height); ++q)
      for (int64_t column = 0; column < width; ++column)
        for (int b = 0; b < 4; ++b, packed += Vec::kDotBytes)
          for (int lane = 0; lane < Vec::kWidth / 4; ++lane) {
            const int64_t c = byte_of(b, lane) % (Vec::kWidth / parts);
            int8_t taps[4] = {};
            for (int64_t i = 0; i < 4 && q * 4 + i < height && c < valid; ++i)
              taps[i] = weight[((first + c) * height + q * 4 + i) * width + column];
            Vec::pack_weight(taps, lane, packed);
          }
  });
}

template <class Vec>
int64_t arranged(int64_t channels) {
  return packed_bytes<Vec>(channels, 1, 1) / Vec::kDotBytes / 4 * Vec::kWidth;
}

template <class Vec>
void arrange(const void* by_channel, int64_t channels, void* out) {
  const int32_t* from = static_cast<const int32_t*>(by_channel);
  int32_t* to = static_cast<int32_t*>(out);
  each_block<Vec>(channels, [&](auto parts, int64_t first, int64_t valid) {
    constexpr int64_t kBlock = Vec::kWidth / parts;
    int32_t block[kBlock] = {};
    std::copy_n(from + first, valid, block);
    for (int b = 0; b < 4; ++b)
      for (int lane = 0; lane < Vec::kWidth / 4; lane += 4, to += 4) std::copy_n(block + byte_of(b, lane) % kBlock, 4, to);
  });
}

// What the pixels of one block of channels have in common. `rows` are where the block's columns begin.
template <class Vec>
struct Block {
  const uint8_t* const* rows;
  int64_t height, width, stride;
  const int8_t* weights;
  const int32_t* offset;
  const float* multiplier;
  typename Vec::Rounding rounding;
  uint8_t* out;
  int64_t pixels, channels, valid;
};

// Four rows of a column, interleaved. Those past the height repeat another one: their weights are 0. Stride 0 is any.
template <class Vec, int Parts, int Stride>
struct Lanes {
  typename Vec::Acc of[4];
  Lanes(const uint8_t* const* rows, int64_t count, int64_t at, int64_t step) {
    const auto r0 = load(rows[0] + at, step), r1 = count > 1 ? load(rows[1] + at, step) : r0;
    const auto r2 = count > 2 ? load(rows[2] + at, step) : r0, r3 = count > 3 ? load(rows[3] + at, step) : r0;
    const auto low01 = Vec::low8(r0, r1), low23 = Vec::low8(r2, r3);
    const auto high01 = Vec::high8(r0, r1), high23 = Vec::high8(r2, r3);
    of[0] = Vec::low16(low01, low23), of[1] = Vec::high16(low01, low23);
    of[2] = Vec::low16(high01, high23), of[3] = Vec::high16(high01, high23);
  }
  static typename Vec::Acc load(const uint8_t* x, int64_t step) {
    if constexpr (Parts == 1 || Stride == 1)
      return Vec::load(x);
    else
      return Vec::template gather<Parts>(x, step);
  }
};

// At most `Most` bytes, in moves that the compiler writes out: a call would put every register into memory around it.
template <int64_t Most>
inline __attribute__((always_inline)) void copy_few(uint8_t* to, const uint8_t* from, int64_t bytes) {
  if (bytes & Most) {
    std::memcpy(to, from, Most);
    to += Most, from += Most;
  }
  if constexpr (Most > 1) copy_few<Most / 2>(to, from, bytes);
}

// The bytes of `Parts` pixels, of which `count` are wanted.
template <class Vec, int Parts>
inline __attribute__((always_inline)) void put(const typename Vec::Acc (&sums)[4], const float* multiplier,
                                               const typename Vec::Rounding& rounding, uint8_t* out, int64_t channels,
                                               int64_t valid, int64_t count) {
  constexpr int64_t kBlock = Vec::kWidth / Parts;
  if constexpr (requires { Vec::template store_part<Parts, 0>(out, sums[0], valid); }) {
    const auto bytes = Vec::finish(sums, multiplier, rounding);
    each<Parts>([&](auto p) __attribute__((always_inline)) {
      Vec::template store_part<Parts, p>(out + p * channels, bytes, p < count ? valid : 0);
    });
  } else {
    if (Parts == 1 && valid == kBlock) return Vec::store(out, Vec::finish(sums, multiplier, rounding));
    alignas(64) uint8_t whole[Vec::kWidth];
    Vec::store(whole, Vec::finish(sums, multiplier, rounding));
    OCTET_UNROLL
    for (int p = 0; p < Parts; ++p) {
      if (p >= count) break;
      if (valid == kBlock)
        std::memcpy(out + p * channels, whole + p * kBlock, kBlock);
      else
        copy_few<kBlock>(out + p * channels, whole + p * kBlock, valid);
    }
  }
}

// Kernels of a known size: Parts pixels a step.
template <class Vec, int Parts, int Height, int Width, int Stride>
void row_of(const Block<Vec>& by) {
  constexpr int kBlock = Vec::kWidth / Parts, kQuads = (Height + 3) / 4;
  // Columns from one vector of output pixels to the next, vectors that are in the making at once, columns that each step adds.
  constexpr int kStep = Parts * Stride, kAlive = (Width + kStep - 1) / kStep, kNew = std::min(Width, kStep);
  const typename Vec::Rounding rounding = by.rounding;
  const uint8_t* rows[Height];
  for (int r = 0; r < Height; ++r) rows[r] = by.rows[r];
  typename Vec::Acc sums[kAlive][4];
  // In registers for all the row where they fit there; a copy elsewhere would only be read from memory again.
  constexpr int kWeights = kQuads * Width * 4;
  constexpr bool kHeld = kWeights <= Vec::kHeldWeights;
  typename Vec::Weight held[kHeld ? kWeights : 1];
  if constexpr (kHeld) each<kWeights>([&](auto i) { held[i] = Vec::weight(by.weights + i * Vec::kDotBytes); });
  const int8_t* packed = by.weights;
  const auto weight = [&](int i) __attribute__((always_inline)) {
    return kHeld ? held[kHeld ? i : 0] : Vec::weight(packed + i * Vec::kDotBytes);
  };
  int64_t x = 0;  // of the next output pixel's first column
  // Adds a column, counted from the next pixel's first, to all pixels that see it; sums[first] are the next pixel's.
  const auto add = [&](auto column, auto first) __attribute__((always_inline)) {
    OCTET_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const Lanes<Vec, Parts, Stride> lanes(rows + 4 * q, Height - 4 * q, x + column * kBlock, Stride * kBlock);
      OCTET_UNROLL
      for (int b = 0; b < 4; ++b) {
        const auto dots = Vec::dots(lanes.of[b]);
        OCTET_UNROLL
        for (int later = 0; later < kAlive; ++later) {
          const int tap = column - later * kStep;
          typename Vec::Acc& sum = sums[(first + later) % kAlive][b];
          if (tap >= 0 && tap < Width) sum = Vec::dot(sum, dots, weight((q * Width + tap) * 4 + b));
        }
      }
    }
  };
  const int32_t* offset = by.offset;
  const auto begin = [&](auto which) __attribute__((always_inline)) {
    OCTET_UNROLL
    for (int b = 0; b < 4; ++b) sums[which][b] = Vec::constant(offset + b * (Vec::kWidth / 4));
  };
  const float* multiplier = by.multiplier;
  const int64_t channels = by.channels, valid = by.valid;
  uint8_t* out = by.out;
  int64_t left = by.pixels;
  const auto step = [&](auto first) __attribute__((always_inline)) {
    each<kNew>([&](auto i) __attribute__((always_inline)) { add(constant<Width - kNew + i>, first); });
    put<Vec, Parts>(sums[first], multiplier, rounding, out, channels, valid, left);
    begin(first);
    x += kStep * kBlock, out += Parts * channels, left -= Parts;
  };
  each<kAlive>(begin);
  each<Width - kNew>([&](auto column) __attribute__((always_inline)) { add(column, constant<0>); });
  while (left > (kAlive - 1) * Parts) each<kAlive>(step);
  each<kAlive - 1>([&](auto i) __attribute__((always_inline)) {
    if (left > 0) step(i);
  });
}

// The sums of `Parts` pixels times their multipliers, of which `count` are wanted.
template <class Vec, int Parts>
inline void put_reals(const typename Vec::Acc (&sums)[4], const float* multiplier, float* out, int64_t channels, int64_t valid,
                      int64_t count) {
  constexpr int kBlock = Vec::kWidth / Parts, kLanes = Vec::kWidth / 4;
  alignas(64) int32_t lanes[Vec::kWidth];
  float reals[Vec::kWidth];
  std::memcpy(lanes, sums, sizeof lanes);
  for (int b = 0; b < 4; ++b)
    for (int first = 0; first < kLanes; first += 4)
      for (int lane = first; lane < first + 4; ++lane)
        reals[first * 4 + b * 4 + lane % 4] = static_cast<float>(lanes[b * kLanes + lane]) * multiplier[b * kLanes + lane];
  for (int p = 0; p < Parts && p < count; ++p) std::memcpy(out + p * channels, reals + p * kBlock, valid * sizeof(float));
}

// Kernels of any size. finish(sums, pixel) gets the sums of Parts pixels from `pixel`.
template <class Vec, int Parts, class Finish>
void row_any(const Block<Vec>& by, const Finish& finish) {
  constexpr int kBlock = Vec::kWidth / Parts;
  for (int64_t pixel = 0; pixel < by.pixels; pixel += Parts) {
    typename Vec::Acc sums[4];
    for (int b = 0; b < 4; ++b) sums[b] = Vec::constant(by.offset + b * (Vec::kWidth / 4));
    const int8_t* w = by.weights;
    for (int64_t r = 0; r < by.height; r += 4)
      for (int64_t column = 0; column < by.width; ++column) {
        const int64_t at = (pixel * by.stride + column) * kBlock;
        const Lanes<Vec, Parts, 0> lanes(by.rows + r, by.height - r, at, by.stride * kBlock);
        for (int b = 0; b < 4; ++b, w += Vec::kDotBytes) sums[b] = Vec::dot(sums[b], Vec::dots(lanes.of[b]), Vec::weight(w));
      }
    finish(sums, pixel);
  }
}

template <class Vec, int Parts>
void block(const Block<Vec>& by) {
  const auto is = [&](int64_t size, int64_t stride) {
    return by.height == size && by.width == size && by.stride == stride;
  };
  if (is(3, 1)) return row_of<Vec, Parts, 3, 3, 1>(by);
  if (is(3, 2)) return row_of<Vec, Parts, 3, 3, 2>(by);
  if (is(5, 1)) return row_of<Vec, Parts, 5, 5, 1>(by);
  if (is(5, 2)) return row_of<Vec, Parts, 5, 5, 2>(by);
  row_any<Vec, Parts>(by, [&](const typename Vec::Acc (&sums)[4], int64_t pixel) __attribute__((always_inline)) {
    put<Vec, Parts>(sums, by.multiplier, by.rounding, by.out + pixel * by.channels, by.channels, by.valid, by.pixels - pixel);
  });
}

// Where the sums of a block begin: at the offset, and where bytes are centred, at what makes up for it, 128 times the weights' sum.
// That is exact: both fit int32 (packed_gemm.h).
template <class Vec>
struct Beginning {
  using Acc = typename Vec::Acc;
  static constexpr int kLanes = Vec::kWidth / 4;
  alignas(64) int32_t sums[Vec::kWidth];
  Beginning(const int32_t* offset, const int8_t* packed, int64_t columns) {
    for (int b = 0; b < 4; ++b) {
      Acc of_zeros{};
      for (int64_t i = b; i < columns * 4; i += 4)
        of_zeros = Vec::dot(of_zeros, Vec::dots(Acc{}), Vec::weight(packed + i * Vec::kDotBytes));
      std::memcpy(sums + b * kLanes, &of_zeros, sizeof of_zeros);
      for (int lane = b * kLanes; lane < (b + 1) * kLanes; ++lane) sums[lane] = wrapped_sum(offset[lane], -sums[lane]);
    }
  }
};

// compute(Parts, block, first channel) computes each block of channels, which leaves `out` to it.
template <class Vec, class Compute>
void row_by_blocks(const uint8_t* const* rows, int64_t columns, int64_t pixels, int64_t channels, int64_t height, int64_t width,
                   int64_t stride, const int8_t* packed, const Requantize& by, const Compute& compute) {
  const uint8_t* begins[kDepthwiseMost];
  std::copy_n(rows, height, begins);
  const typename Vec::Rounding rounding(by);
  const int32_t* offset = by.offset;
  const float* multiplier = by.multiplier;
  each_block<Vec>(channels, [&](auto parts, int64_t c, int64_t valid) {
    const auto from = [&](const int32_t* start) {
      compute(parts, Block<Vec>{begins, height, width, stride, packed, start, multiplier, rounding, nullptr, pixels, channels, valid}, c);
    };
    const int64_t dots = quads_of(height) * width;
    if constexpr (requires { Vec::kCentred; })
      from(Beginning<Vec>(offset, packed, dots).sums);
    else
      from(offset);
    packed += dots * 4 * Vec::kDotBytes;
    offset += Vec::kWidth, multiplier += Vec::kWidth;
    for (int64_t r = 0; r < height; ++r) begins[r] += columns * (Vec::kWidth / parts);
  });
}

template <class Vec>
void row(const uint8_t* const* rows, int64_t columns, int64_t pixels, int64_t channels, int64_t height, int64_t width,
         int64_t stride, const int8_t* packed, const Requantize& by, uint8_t* out) {
  row_by_blocks<Vec>(rows, columns, pixels, channels, height, width, stride, packed, by, [&](auto parts, Block<Vec> one, int64_t c) {
    one.out = out + c;
    block<Vec, parts>(one);
  });
}

template <class Vec>
void row_reals(const uint8_t* const* rows, int64_t columns, int64_t pixels, int64_t channels, int64_t height, int64_t width,
               int64_t stride, const int8_t* packed, const Requantize& by, float* out) {
  row_by_blocks<Vec>(rows, columns, pixels, channels, height, width, stride, packed, by,
                     [&](auto parts, const Block<Vec>& one, int64_t c) {
                       row_any<Vec, parts>(one, [&](const typename Vec::Acc (&sums)[4], int64_t pixel) {
                         put_reals<Vec, parts>(sums, one.multiplier, out + pixel * channels + c, channels, one.valid, pixels - pixel);
                       });
                     });
}

template <class Vec>
constexpr NativeDepthwise table() {
  return {&placed_bytes<Vec>, &place<Vec>,    &packed_bytes<Vec>, &pack<Vec>,
          &arranged<Vec>,     &arrange<Vec>, &row<Vec>,          &row_reals<Vec>};
}

#undef OCTET_UNROLL

}  // namespace octet::depthwise

// The depthwise convolution, written once over vectors of 16, 32 and 64 channels.
//
// The products of a channel are summed over taps, and a dot product sums neighbouring bytes: so the four rows above each
// other in a column of the kernel are interleaved, channel by channel, into one 32-bit lane. A column interleaved once
// serves every output pixel of a strip that sees it. Interleaving works within 128 bits, so register b of a block holds
// channels 4 b .. 4 b + 3 of each 16; packing to bytes at the end puts them back in order.
//
// A `Vec` says: Acc (its register), kWidth (channels), kDotBytes (of packed weights per register and column of four
// rows), zero, load, interleave8 and 16 (low and high), dots (what a lane of bytes is turned into before it is
// multiplied), dot, pack_weight, Rounding and finish (four registers to kWidth bytes).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "native.h"

#define OCTET_UNROLL _Pragma("GCC unroll 32")

namespace octet::depthwise {

inline int64_t quads_of(int64_t height) { return (height + 3) / 4; }

// Channel that lane `lane` of register `b` holds, of a block.
inline int64_t channel_of(int b, int lane) { return lane / 4 * 16 + b * 4 + lane % 4; }

// fn(vec, first channel) for blocks of the widest vectors that fit; the last one of 16 overlaps the one before where the
// channels are no multiple of 16, and computes the same values again. channels >= 16.
template <class First, class... Narrower, class Fn>
inline void each_block(int64_t channels, Fn fn, int64_t c = 0) {
  for (; c + First::kWidth <= channels; c += First::kWidth) fn(First{}, c);
  if constexpr (sizeof...(Narrower) > 0) return each_block<Narrower...>(channels, fn, c);
  if (c < channels) fn(First{}, channels - First::kWidth);
}

template <class... Vecs>
int64_t packed_bytes(int64_t channels, int64_t height, int64_t width) {
  int64_t bytes = 0;
  each_block<Vecs...>(channels, [&](auto vec, int64_t) { bytes += quads_of(height) * width * 4 * vec.kDotBytes; });
  return bytes;
}

template <class... Vecs>
void pack(const int8_t* weight, int64_t channels, int64_t height, int64_t width, int8_t* packed) {
  each_block<Vecs...>(channels, [&](auto vec, int64_t first) {
    for (int64_t q = 0; q < quads_of(height); ++q)
      for (int64_t column = 0; column < width; ++column)
        for (int b = 0; b < 4; ++b, packed += vec.kDotBytes)
          for (int lane = 0; lane < vec.kWidth / 4; ++lane) {
            int8_t taps[4];
            for (int64_t i = 0; i < 4; ++i) {
              const int64_t row = q * 4 + i;
              taps[i] = row < height ? weight[((first + channel_of(b, lane)) * height + row) * width + column] : 0;
            }
            vec.pack_weight(taps, lane, packed);
          }
  });
}

template <class... Vecs>
void arrange(const void* by_channel, int64_t channels, void* out) {
  const int32_t* from = static_cast<const int32_t*>(by_channel);
  int32_t* to = static_cast<int32_t*>(out);
  each_block<Vecs...>(channels, [&](auto vec, int64_t first) {
    for (int b = 0; b < 4; ++b)
      for (int lane = 0; lane < vec.kWidth / 4; ++lane) *to++ = from[first + channel_of(b, lane)];
  });
}

// `Pixels` neighbouring output pixels of one block of channels. Width and Stride are 0 where they are only known now.
template <class Vec, int Pixels, int Width, int Stride>
inline void strip(const uint8_t* const* columns, int64_t quads, int64_t width, int64_t c, const int8_t* w,
                  const Requantize& by, const typename Vec::Rounding& rounding, int64_t at, uint8_t* out,
                  int64_t channels) {
  static_assert(Pixels == 1 || Width > 0);
  typename Vec::Acc sums[Pixels][4];
  OCTET_UNROLL
  for (int p = 0; p < Pixels; ++p)
    OCTET_UNROLL
    for (int b = 0; b < 4; ++b) sums[p][b] = Vec::zero();
  const int64_t rows = quads * 4;
  for (int64_t q = 0; q < quads; ++q) {
    const auto add_column = [&](int64_t column, auto sees) __attribute__((always_inline)) {
      const uint8_t* const* x = columns + column * rows + q * 4;
      const auto r0 = Vec::load(x[0] + c), r1 = Vec::load(x[1] + c), r2 = Vec::load(x[2] + c), r3 = Vec::load(x[3] + c);
      const auto low01 = Vec::low8(r0, r1), low23 = Vec::low8(r2, r3);
      const auto high01 = Vec::high8(r0, r1), high23 = Vec::high8(r2, r3);
      const typename Vec::Acc lanes[4] = {Vec::low16(low01, low23), Vec::high16(low01, low23),
                                          Vec::low16(high01, high23), Vec::high16(high01, high23)};
      OCTET_UNROLL
      for (int b = 0; b < 4; ++b) {
        const auto dots = Vec::dots(lanes[b]);
        OCTET_UNROLL
        for (int p = 0; p < Pixels; ++p) {
          const int64_t tap = sees(p);
          if (tap >= 0) sums[p][b] = Vec::dot(sums[p][b], dots, w + ((q * width + tap) * 4 + b) * Vec::kDotBytes);
        }
      }
    };
    if constexpr (Width > 0) {
      OCTET_UNROLL
      for (int column = 0; column < (Pixels - 1) * Stride + Width; ++column)
        add_column(column, [&](int p) {
          const int tap = column - p * Stride;
          return tap < Width ? tap : -1;
        });
    } else {
      for (int64_t column = 0; column < width; ++column) add_column(column, [&](int) { return column; });
    }
  }
  OCTET_UNROLL
  for (int p = 0; p < Pixels; ++p)
    Vec::finish(sums[p], by.offset + at, by.multiplier + at, rounding, out + p * channels + c);
}

template <int Pixels, int Width, int Stride, class... Vecs>
void pixels_of(const uint8_t* const* columns, int64_t count, int64_t channels, int64_t height, int64_t width,
               int64_t stride, const int8_t* packed, const Requantize& by, uint8_t* out) {
  const int64_t quads = quads_of(height);
  for (; count >= Pixels; count -= Pixels, columns += Pixels * stride * quads * 4, out += Pixels * channels) {
    const int8_t* w = packed;
    int64_t at = 0;
    each_block<Vecs...>(channels, [&](auto vec, int64_t c) {
      const typename decltype(vec)::Rounding rounding(by);
      strip<decltype(vec), Pixels, Width, Stride>(columns, quads, width, c, w, by, rounding, at, out, channels);
      w += quads * width * 4 * vec.kDotBytes;
      at += vec.kWidth;
    });
  }
  if constexpr (Pixels > 1) {
    if (count)
      pixels_of<Pixels / 2, Width, Stride, Vecs...>(columns, count, channels, height, width, stride, packed, by, out);
  }
}

template <int Pixels, class... Vecs>
void row(const uint8_t* const* columns, int64_t pixels, int64_t channels, int64_t height, int64_t width, int64_t stride,
         const int8_t* packed, const Requantize& by, uint8_t* out) {
  const auto fixed = [&](auto kernel) { kernel(columns, pixels, channels, height, width, stride, packed, by, out); };
  if (width == 3 && stride == 1) return fixed(&pixels_of<Pixels, 3, 1, Vecs...>);
  if (width == 3 && stride == 2) return fixed(&pixels_of<Pixels, 3, 2, Vecs...>);
  if (width == 5 && stride == 1) return fixed(&pixels_of<Pixels, 5, 1, Vecs...>);
  if (width == 5 && stride == 2) return fixed(&pixels_of<Pixels, 5, 2, Vecs...>);
  fixed(&pixels_of<1, 0, 0, Vecs...>);
}

template <int Pixels, class... Vecs>
constexpr NativeDepthwise table() {
  return {&packed_bytes<Vecs...>, &pack<Vecs...>, &arrange<Vecs...>, &row<Pixels, Vecs...>};
}

#undef OCTET_UNROLL

}  // namespace octet::depthwise

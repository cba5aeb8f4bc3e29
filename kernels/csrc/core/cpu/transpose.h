// Turns rows into columns, in squares that fit registers: between channels side by side and pixels side by side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace octet {

template <class T>
struct Square {
  static constexpr int kSide = 16 / static_cast<int>(sizeof(T));
  typedef T Row __attribute__((vector_size(16)));

  static Row low(Row a, Row b) {
    if constexpr (kSide == 16)
      return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    else
      return __builtin_shufflevector(a, b, 0, 4, 1, 5);
  }
  static Row high(Row a, Row b) {
    if constexpr (kSide == 16)
      return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    else
      return __builtin_shufflevector(a, b, 2, 6, 3, 7);
  }
  // Interleaving row i with row i + half, log2(side) times over, is a transposition.
  static void transpose(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
    Row rows[kSide], next[kSide];
    for (int i = 0; i < kSide; ++i) std::memcpy(&rows[i], from + i * from_stride, 16);
    for (int turn = 1; turn < kSide; turn *= 2) {
      for (int i = 0; i < kSide / 2; ++i)
        next[2 * i] = low(rows[i], rows[i + kSide / 2]), next[2 * i + 1] = high(rows[i], rows[i + kSide / 2]);
      std::copy(next, next + kSide, rows);
    }
    for (int i = 0; i < kSide; ++i) std::memcpy(to + i * to_stride, &rows[i], 16);
  }
};

// to[c * to_stride + r] = from[r * from_stride + c] for `rows` x `columns` values of 1 or 4 bytes.
template <class T>
inline void transpose(const T* from, int64_t from_stride, int64_t rows, int64_t columns, T* to, int64_t to_stride) {
  constexpr int64_t side = Square<T>::kSide;
  const int64_t whole_rows = rows / side * side, whole_columns = columns / side * side;
  for (int64_t c = 0; c < whole_columns; c += side) {
    for (int64_t r = 0; r < whole_rows; r += side)
      Square<T>::transpose(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
    for (int64_t r = whole_rows; r < rows; ++r)
      for (int64_t i = c; i < c + side; ++i) to[i * to_stride + r] = from[r * from_stride + i];
  }
  for (int64_t c = whole_columns; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) to[c * to_stride + r] = from[r * from_stride + c];
}

// Pixels and channels that are turned at a time: what is read and what is written both stay in the first cache.
constexpr int64_t kTilePixels = 256, kTileChannels = 64;

// fn(first pixel, pixels, first channel, channels) over all tiles of one sample.
template <class Fn>
inline void each_tile(int64_t pixels, int64_t channels, Fn fn) {
  for (int64_t p = 0; p < pixels; p += kTilePixels)
    for (int64_t c = 0; c < channels; c += kTileChannels)
      fn(p, std::min(kTilePixels, pixels - p), c, std::min(kTileChannels, channels - c));
}

}  // namespace octet

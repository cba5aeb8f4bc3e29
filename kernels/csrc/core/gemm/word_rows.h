// Rows of few bytes, copied so that each begins at a word: kernels read four of a row at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace octet {

// Bytes of a row of `k` that kernels read to its end and no further.
inline int64_t word_row(int64_t k) { return (k + 3) / 4 * 4; }

// Rows of k bytes, one after the other, to rows of word_row(k). Up to 15 bytes past the last are written; none past the last of
// `from` are read.
inline void copy_to_words(const uint8_t* from, int64_t k, int64_t count, uint8_t* to) {
  const int64_t ld = word_row(k);
  if (k == ld) {
    std::memcpy(to, from, count * k);
    return;
  }
  // Whole words are copied, of the next rows too, which then write their own; the last rows have nothing behind them.
  const int64_t step = k < 4 ? 4 : 16, wide = (k + step - 1) / step * step;
  const int64_t whole = std::max<int64_t>(0, count - (wide + k - 1) / k);
  if (k < 4) {
    for (int64_t i = 0; i < whole; ++i) {
      uint32_t word;
      std::memcpy(&word, from + i * k, sizeof word);
      std::memcpy(to + i * 4, &word, sizeof word);
    }
  } else {
    for (int64_t i = 0; i < whole; ++i)
      for (int64_t j = 0; j < k; j += 16) std::memcpy(to + i * ld + j, from + i * k + j, 16);
  }
  for (int64_t i = whole; i < count; ++i) std::memcpy(to + i * ld, from + i * k, k);
}

}  // namespace octet

// Rows of activations in tiles, for tile_amx.h: of a matrix, and of an image as it lies.
//
// All tiles of a call have one number of rows, so that one configuration serves it: as many as are equal parts, and the last may lie over
// rows of the one before. Each kind says `count` and `size`, where tile t lies (`at`), and by `each_run(t, fn)` where those of its
// rows go that no tile before has: fn(row of the tile, row of the product, rows) for rows that lie side by side in both.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/cpu/of_thread.h"
#include "core/gemm/amx_tiles.h"
#include "core/gemm/tile.h"

namespace octet::amx {
namespace {

using tile::ceil_div;

// Steps of equal size, of at most a tile's width, that cover `k` bytes.
struct Depth {
  int64_t steps, step;
  explicit Depth(int64_t k) : steps(ceil_div(k, kTileBytes)), step(steps ? 4 * ceil_div(ceil_div(k, 4), steps) : 0) {}
  int64_t bytes() const { return steps * step; }

  // Steps that fill `bytes` exactly, which pieces need: their weights lie side by side. None where they would be short ones.
  static Depth filling(int64_t bytes) {
    const int64_t quads = ceil_div(bytes, 4), least = ceil_div(quads, kTileBytes / 4);
    Depth depth(0);
    for (int64_t steps = least; 4 * steps <= 5 * least; ++steps)
      if (quads % steps == 0) return depth.steps = steps, depth.step = 4 * (quads / steps), depth;
    return depth;
  }
};

// What a product reads of each row: pieces, each in steps.
struct Reads {
  Depth depth;
  const int64_t* starts;
  int64_t pieces;
};

struct Operand {
  const void* from;
  int64_t ld;  // bytes from row to row
};

// The last tile is a copy where tiles read past K, as behind the last row there may be no memory.
class MatrixTiles {
 public:
  const int64_t count, size;

  MatrixTiles(const uint8_t* x, int64_t ldx, int64_t m, int64_t k, const Depth& depth)
      : count(ceil_div(m, kTileRows)), size(ceil_div(m, count)), x_(x), ldx_(ldx), m_(m), last_{row(count - 1), ldx} {
    if (depth.bytes() == k) return;
    thread_local FileBuffer<uint8_t>* own = nullptr;
    const int64_t ld = depth.bytes();
    uint8_t* const copy = of_thread(own).get(size * ld);
    for (int64_t i = 0; i < size; ++i) {
      std::memcpy(copy + i * ld, row(count - 1) + i * ldx, k);
      std::memset(copy + i * ld + k, 0, ld - k);
    }
    last_ = {copy, ld};
  }
  int64_t first_row(int64_t tile) const { return std::min(tile * size, m_ - size); }
  Operand at(int64_t tile) const { return tile + 1 == count ? last_ : Operand{row(tile), ldx_}; }
  template <class Fn>
  void each_run(int64_t tile, Fn fn) const {
    const int64_t known = tile * size - first_row(tile);
    fn(known, tile * size, size - known);
  }

 private:
  const uint8_t* row(int64_t tile) const { return x_ + first_row(tile) * ldx_; }

  const uint8_t* x_;
  int64_t ldx_, m_;
  Operand last_;
};

// Tiles within the lines of an image; or across their ends where these are fewer, as rows can be counted on over what lies between
// two lines: those are computed and go nowhere.
class ImageTiles {
 public:
  const ImageRows& image;
  const bool across;
  const int64_t lines, rows;  // that tiles stay within, and the rows of each
  const int64_t of_line;      // tiles
  const int64_t count, size;

  explicit ImageTiles(const ImageRows& x)
      : image(x),
        across(x.line % x.pixel == 0 && ceil_div(rows_across(x), kTileRows) <= x.lines * ceil_div(x.width, kTileRows)),
        lines(across ? 1 : x.lines),
        rows(across ? rows_across(x) : x.width),
        of_line(ceil_div(rows, kTileRows)),
        count(lines * of_line),
        size(ceil_div(rows, of_line)) {}

  Operand at(int64_t tile) const {
    return {image.first + tile / of_line * image.line + first_row(tile % of_line) * image.pixel, image.pixel};
  }
  template <class Fn>
  void each_run(int64_t tile, Fn fn) const {
    const int64_t of = tile % of_line, begin = of * size, known = begin - first_row(of);
    if (!across) return fn(known, tile / of_line * image.width + begin, size - known);
    const int64_t walk = image.line / image.pixel;
    int64_t line = begin / walk, column = begin % walk;
    for (int64_t row = known; row < size; row += walk - column, column = 0, ++line)
      if (column < image.width) fn(row, line * image.width + column, std::min(image.width - column, size - row));
  }

 private:
  static int64_t rows_across(const ImageRows& x) { return (x.lines - 1) * (x.line / x.pixel) + x.width; }
  int64_t first_row(int64_t tile) const { return std::min(tile * size, rows - size); }
};

}  // namespace
}  // namespace octet::amx

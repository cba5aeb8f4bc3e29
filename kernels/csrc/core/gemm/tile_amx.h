// Products in the tiles of AMX, written once over a policy of tiles (amx_tiles.h) and an `Arch` of tile.h: that takes what has too
// few rows for tiles, and requantises.
//
// Packed as tile.h packs, groups of 64 outputs as [k / 4][block of 16 outputs][lane][4], so that both read one weight; a tile
// of weights is up to 16 rows of a block, `blocks * 64` bytes apart. Depth is cut into `steps` equal steps of at most 64 bytes, and
// zero weights fill the last: one configuration serves a whole product, and what is read of activations past their K is
// multiplied by zero.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/gemm/amx_tiles.h"
#include "core/gemm/tile.h"

namespace octet::amx {
namespace {

using tile::ceil_div;

// A weight up to this size stays in the L2 cache and is read again for each block of rows, which stay in the L1 cache; past a
// larger one go all rows, group by group.
constexpr int64_t kCachedWeight = 768 << 10, kCachedRows = 8 << 10;

// Whether tiles are faster than vectors (measured from 1 to 64 rows and 16 to 1024 values on an Emerald Rapids).
inline bool pays(int64_t rows, int64_t k) { return (rows >= 6 && k >= 128) || (rows >= 16 && k >= 64); }

struct Depth {
  int64_t steps, step;
  explicit Depth(int64_t k) : steps(ceil_div(k, kTileBytes)), step(steps ? 4 * ceil_div(ceil_div(k, 4), steps) : 0) {}
  int64_t bytes() const { return steps * step; }
};

// Rows of activations in tiles of equal size: the last tile may lie over rows of the one before, which are then computed twice.
// It is a copy where tiles read past K, as behind the last row there may be no memory.
class RowTiles {
 public:
  const int64_t count, size;  // of the tiles, and of each in rows

  RowTiles(const uint8_t* x, int64_t ldx, int64_t m, int64_t k, const Depth& depth)
      : count(ceil_div(m, kTileRows)), size(ceil_div(m, count)), x_(x), ldx_(ldx), m_(m), last_(at(count - 1)), last_ld_(ldx) {
    if (depth.bytes() == k) return;
    thread_local FileBuffer<uint8_t> buffer;
    last_ld_ = depth.bytes();
    uint8_t* const copy = buffer.get(size * last_ld_);
    for (int64_t row = 0; row < size; ++row) {
      std::memcpy(copy + row * last_ld_, last_ + row * ldx, k);
      std::memset(copy + row * last_ld_ + k, 0, last_ld_ - k);
    }
    last_ = copy;
  }
  int64_t first_row(int64_t tile) const { return std::min(tile * size, m_ - size); }
  const uint8_t* rows(int64_t tile) const { return tile + 1 == count ? last_ : at(tile); }
  int64_t ld(int64_t tile) const { return tile + 1 == count ? last_ld_ : ldx_; }

 private:
  const uint8_t* at(int64_t tile) const { return x_ + first_row(tile) * ldx_; }

  const uint8_t* x_;
  int64_t ldx_, m_;
  const uint8_t* last_;
  int64_t last_ld_;
};

// Tiles 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights.
template <class Tiles>
void configure(int64_t rows, int64_t step) {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, rows, kTileBytes);
  for (int tile = 4; tile < 6; ++tile) config.set(tile, rows, step);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, step / 4, kTileBytes);
  Tiles::configure(config);
}

struct Operand {
  const void* from;
  int64_t ld;  // bytes from row to row
};

// The sums of R tiles of rows and C blocks of outputs; tile (r, c) goes to sums + r * down + 16 * c, rows `ld` values apart.
//
// Each tile of operands is zeroed after its last use. That takes no time and gives back the register behind it: where these are
// short, a load waits for one, and the loop takes 95 ns a step in the place of 60.
template <class Tiles, int R, int C>
OCTET_TILE_INLINE void product(const Operand (&x)[2], const Operand& weight, const Depth& depth, int32_t* sums, int64_t ld,
                          int64_t down) {
  static_assert(R <= 2 && C <= 2);
  Tiles::template zero<0>();
  if constexpr (C == 2) Tiles::template zero<1>();
  if constexpr (R == 2) Tiles::template zero<2>();
  if constexpr (R == 2 && C == 2) Tiles::template zero<3>();
  const int8_t* w = static_cast<const int8_t*>(weight.from);
  const uint8_t *above = static_cast<const uint8_t*>(x[0].from), *below = static_cast<const uint8_t*>(x[1].from);
  for (int64_t s = 0; s < depth.steps; ++s, w += depth.step / 4 * weight.ld) {
    Tiles::template load<4>(above + s * depth.step, x[0].ld);
    Tiles::template load<6>(w, weight.ld);
    Tiles::template dot<0, 4, 6>();
    if constexpr (C == 2) {
      Tiles::template load<7>(w + kTileBytes, weight.ld);
      Tiles::template dot<1, 4, 7>();
    }
    Tiles::template zero<4>();
    if constexpr (R == 2) {
      Tiles::template load<5>(below + s * depth.step, x[1].ld);
      Tiles::template dot<2, 5, 6>();
    }
    Tiles::template zero<6>();
    if constexpr (R == 2 && C == 2) Tiles::template dot<3, 5, 7>();
    if constexpr (R == 2) Tiles::template zero<5>();
    if constexpr (C == 2) Tiles::template zero<7>();
  }
  const int64_t stride = ld * static_cast<int64_t>(sizeof(int32_t));
  Tiles::template store<0>(sums, stride);
  if constexpr (C == 2) Tiles::template store<1>(sums + 16, stride);
  if constexpr (R == 2) Tiles::template store<2>(sums + down, stride);
  if constexpr (R == 2 && C == 2) Tiles::template store<3>(sums + down + 16, stride);
}

// The same for the B blocks of a group.
template <class Tiles, int R, int B>
void products(const Operand (&x)[2], const int8_t* w, const Depth& depth, int32_t* sums, int64_t ld, int64_t down) {
  constexpr int64_t kRow = B * kTileBytes;
  if constexpr (B >= 2) product<Tiles, R, 2>(x, {w, kRow}, depth, sums, ld, down);
  if constexpr (B == 4) product<Tiles, R, 2>(x, {w + 2 * kTileBytes, kRow}, depth, sums + 32, ld, down);
  if constexpr (B % 2) product<Tiles, R, 1>(x, {w + (B - 1) * kTileBytes, kRow}, depth, sums + (B - 1) * 16, ld, down);
}

// Rows of sums to where `out` wants them.
template <int B, class Out>
void put(const Out& out, const int32_t* sums, int64_t rows, int64_t columns) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) out.at(row, 0).template put<4, B>(sums + row * B * 16, columns);
  for (; row < rows; ++row) out.at(row, 0).template put<1, B>(sums + row * B * 16, columns);
}

// R tiles of rows from `first` on, and a group of B blocks. `out` is at row 0 and the group's first output.
template <class Tiles, int R, int B, class Out>
void leave(const RowTiles& rows, int64_t first, const int8_t* w, const Depth& depth, const Out& out, int64_t columns) {
  const int64_t to = rows.first_row(first), second = rows.first_row(first + R - 1);
  const Operand x[2] = {{rows.rows(first), rows.ld(first)}, {rows.rows(first + R - 1), rows.ld(first + R - 1)}};
  if (columns >= B * 16 && out.whole_rows()) {
    int32_t* const sums = out.at(to, 0).whole_rows();
    return products<Tiles, R, B>(x, w, depth, sums, out.ld, (second - to) * out.ld);
  }
  alignas(64) int32_t sums[R * kTileRows * B * 16];
  const int64_t down = rows.size * B * 16;
  products<Tiles, R, B>(x, w, depth, sums, B * 16, down);
  put<B>(out.at(to, 0), sums, rows.size, std::min<int64_t>(columns, B * 16));
  if constexpr (R == 2) put<B>(out.at(second, 0), sums + down, rows.size, std::min<int64_t>(columns, B * 16));
}

// Tiles [first, last) of rows past a group of `blocks` blocks.
template <class Tiles, class Out, int B = 4>
void group(int blocks, const RowTiles& rows, int64_t first, int64_t last, const int8_t* w, const Depth& depth, const Out& out,
           int64_t columns) {
  if constexpr (B > 1)
    if (blocks < B) return group<Tiles, Out, B - 1>(blocks, rows, first, last, w, depth, out, columns);
  for (; first + 2 <= last; first += 2) leave<Tiles, 2, B>(rows, first, w, depth, out, columns);
  if (first < last) leave<Tiles, 1, B>(rows, first, w, depth, out, columns);
}

template <class Tiles, class Arch, class Out>
void run_to(const Out& out, const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k,
            int64_t first, int64_t last, bool backwards = false) {
  constexpr int64_t kGroup = tile::kGroup<Arch>;
  static_assert(Arch::kLanes == 16 && Arch::kBlocks == 4 && Arch::kStep == 4);
  const Depth depth(k);
  const auto each_group = [&](const auto& visit) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t n0 = (backwards ? first + last - 1 - i : i) * kGroup;
      visit(n0, tile::blocks_of<Arch>(n, n0), packed + n0 * depth.bytes());
    }
  };
  if (!pays(m, k))
    return each_group([&](int64_t n0, int blocks, const int8_t* w) {
      tile::group<Arch, Out>(blocks, x, ldx, m, w, ceil_div(k, Arch::kStep), out.at(0, n0), n - n0);
    });
  const RowTiles rows(x, ldx, m, k, depth);
  const bool stays = n * depth.bytes() <= kCachedWeight;
  const int64_t at_once = stays ? std::max<int64_t>(2, kCachedRows / (depth.bytes() * rows.size) / 2 * 2) : rows.count;
  configure<Tiles>(rows.size, depth.step);
  for (int64_t begin = 0; begin < rows.count; begin += at_once)
    each_group([&](int64_t n0, int blocks, const int8_t* w) {
      group<Tiles>(blocks, rows, begin, std::min(rows.count, begin + at_once), w, depth, out.at(0, n0), n - n0);
    });
  Tiles::release();  // other libraries have tiles too, and a new thread would inherit this
}

template <class Tiles, class Arch>
struct Gemm {
  static int64_t packed_bytes(int64_t n, int64_t k) { return tile::packed_bytes<Arch>(n, Depth(k).bytes()); }
  static void pack(const int8_t* weight, int64_t n, int64_t k, int8_t* packed) {
    const int64_t depth = Depth(k).bytes();
    FileBuffer<int8_t> buffer;
    int8_t* const filled = buffer.get(n * depth);
    for (int64_t j = 0; j < n; ++j) {
      std::memcpy(filled + j * depth, weight + j * k, k);
      std::memset(filled + j * depth + k, 0, depth - k);
    }
    tile::pack<Arch>(filled, n, depth, packed);
  }
  static void run(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k, int32_t* acc,
                  int64_t ldacc, int64_t first, int64_t last, bool backwards) {
    run_to<Tiles, Arch>(tile::Sums<Arch>{acc, ldacc}, x, ldx, m, packed, n, k, first, last, backwards);
  }
  static void run_u8(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k,
                     const Requantize& by, uint8_t* out, int64_t ldout, int64_t first, int64_t last) {
    const typename Arch::Rounding rounding(by);
    run_to<Tiles, Arch>(tile::Bytes<Arch>{&by, &rounding, out, ldout}, x, ldx, m, packed, n, k, first, last);
  }
  static void run_f32(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k,
                      const Requantize& by, float* out, int64_t ldout, int64_t first, int64_t last) {
    run_to<Tiles, Arch>(tile::Reals<Arch>{&by, out, ldout}, x, ldx, m, packed, n, k, first, last);
  }
};

// Without products of pieces: convolutions gather their rows first.
template <class Tiles, class Arch>
constexpr NativeGemm table(const char* route) {
  using G = Gemm<Tiles, Arch>;
  return {route, tile::kGroup<Arch>, &G::packed_bytes, &G::pack, &G::run, &G::run_u8, &G::run_f32, nullptr};
}

}  // namespace
}  // namespace octet::amx

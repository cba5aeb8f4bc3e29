// Products in the tiles of AMX, written once over a policy of tiles (amx_tiles.h), rows in tiles (amx_rows.h) and an `Arch` of tile.h,
// which requantises. What has too few rows for tiles is left to the table of that Arch.
//
// Packed as tile.h packs, groups of 64 outputs as [k / 4][block of 16 outputs][lane][4], so that both read one weight; a tile
// of weights is up to 16 rows of a block, `blocks * 64` bytes apart. Depth is cut into `steps` equal steps of at most 64 bytes, and
// zero weights fill the last: one configuration serves a whole product, and what is read of activations past their K is
// multiplied by zero.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "core/gemm/amx_rows.h"
#include "core/gemm/amx_tiles.h"
#include "core/gemm/tile_pieces.h"

namespace octet::amx {
namespace {

// A weight up to this size stays in the L2 cache and is read again for each block of rows, which stay in the L1 cache; past a
// larger one go all rows, group by group.
constexpr int64_t kCachedWeight = 768 << 10, kCachedRows = 8 << 10;
// A weight that does not stay there either is asked for so many bytes before a single tile of rows reads it.
constexpr int64_t kStreamedWeight = 1536 << 10, kStreamAhead = 4096;

// Whether tiles are faster than vectors (measured from 1 to 64 rows and 16 to 1024 values on an Emerald Rapids).
inline bool pays(int64_t rows, int64_t k, int64_t n) {
  return ((rows >= 6 && k >= 128) || (rows >= 16 && k >= 64)) && (n > 16 || k >= 256);
}

// Bytes, with the other side of a residual added.
template <class A>
struct AddedBytes : tile::Bytes<A> {
  const typename A::Adding* adding;
  const uint8_t* other;
  AddedBytes at(int64_t rows, int64_t columns) const {
    return {tile::Bytes<A>::at(rows, columns), adding, other + rows * this->ld + columns};
  }
  template <int M, int B>
  void put(const int32_t* sums, int64_t columns) const {
    // A copy, because for all the compiler knows a byte that is written may be one of these.
    const typename A::Adding adding = *this->adding;
    const int32_t* offset = this->by->offset + this->channel;
    const float* multiplier = this->by->multiplier + this->channel;
    for (int64_t m = 0; m < M; ++m)
      A::template requantize_and_add<B>(sums + m * B * A::kLanes, offset, multiplier, adding, other + m * this->ld, columns,
                                        this->out + m * this->ld);
  }
};

// The line that a row of bytes goes to, asked for beforehand: stores that miss would fill the store buffer behind the products.
template <class Tiles, class A>
void expect(const tile::Bytes<A>& out) {
  Tiles::expect(out.out);
}
template <class Tiles, class A>
void expect(const AddedBytes<A>& out) {
  Tiles::expect(out.out);
  __builtin_prefetch(out.other);
}
template <class Tiles, class Out>
void expect(const Out&) {}

// run(out) with where bytes go by `by`.
template <class Arch, class Run>
void with_bytes(const Requantize& by, uint8_t* out, int64_t ldout, const Run& run) {
  const typename Arch::Rounding rounding(by);
  const tile::Bytes<Arch> own{&by, &rounding, out, ldout};
  if (!by.residual) return run(own);
  AddSettings settings = by.residual->by;
  if (!by.residual->first) {  // own values are `a`; additions commute to the bit
    std::swap(settings.a_zero, settings.b_zero);
    std::swap(settings.a_multiplier, settings.b_multiplier);
  }
  const typename Arch::Adding adding{by, settings};
  run(AddedBytes<Arch>{own, &adding, by.residual->other});
}

// The sums of two tiles of rows and C blocks of outputs; tile (r, c) goes to sums + r * down + 16 * c, rows `ld` values apart.
//
// Each tile of operands is zeroed after its last use. That takes no time and gives back the register behind it: where these are
// short, a load waits for one, and the loop takes 95 ns a step in the place of 60.
template <class Tiles, int C>
OCTET_TILE_INLINE void product_of_two(const Operand (&x)[2], const Operand& weight, const Reads& reads, int32_t* sums, int64_t ld,
                                 int64_t down) {
  static_assert(C <= 2);
  Tiles::template zero<0>();
  Tiles::template zero<2>();
  if constexpr (C == 2) Tiles::template zero<1>(), Tiles::template zero<3>();
  const int8_t* w = static_cast<const int8_t*>(weight.from);
  const int64_t step = reads.depth.step, next = step / 4 * weight.ld;
  for (int64_t p = 0; p < reads.pieces; ++p) {
    const uint8_t* above = static_cast<const uint8_t*>(x[0].from) + reads.starts[p];
    const uint8_t* below = static_cast<const uint8_t*>(x[1].from) + reads.starts[p];
    for (int64_t s = 0; s < reads.depth.steps; ++s, w += next, above += step, below += step) {
      Tiles::template load<4>(above, x[0].ld);
      Tiles::template load<6>(w, weight.ld);
      Tiles::template dot<0, 4, 6>();
      if constexpr (C == 2) {
        Tiles::template load<7>(w + kTileBytes, weight.ld);
        Tiles::template dot<1, 4, 7>();
      }
      Tiles::template zero<4>();
      Tiles::template load<5>(below, x[1].ld);
      Tiles::template dot<2, 5, 6>();
      Tiles::template zero<6>();
      if constexpr (C == 2) Tiles::template dot<3, 5, 7>();
      Tiles::template zero<5>();
      if constexpr (C == 2) Tiles::template zero<7>();
    }
  }
  const int64_t stride = ld * static_cast<int64_t>(sizeof(int32_t));
  Tiles::template store<0>(sums, stride);
  Tiles::template store<2>(sums + down, stride);
  if constexpr (C == 2) Tiles::template store<1>(sums + 16, stride), Tiles::template store<3>(sums + down + 16, stride);
}

// The sums of one tile of rows and the B blocks of a group. `streamed`: the weight comes from beyond the L2 cache, and is asked for.
template <class Tiles, int B>
OCTET_TILE_INLINE void product_of_one(const Operand& x, const int8_t* w, const Reads& reads, bool streamed, int32_t* sums,
                                 int64_t ld) {
  constexpr int64_t kRow = B * kTileBytes;
  Tiles::template zero<0>();
  if constexpr (B > 1) Tiles::template zero<1>();
  if constexpr (B > 2) Tiles::template zero<2>();
  if constexpr (B > 3) Tiles::template zero<3>();
  const int64_t step = reads.depth.step, next = step / 4 * kRow;
  for (int64_t p = 0; p < reads.pieces; ++p) {
    const uint8_t* from = static_cast<const uint8_t*>(x.from) + reads.starts[p];
    for (int64_t s = 0; s < reads.depth.steps; ++s, w += next, from += step) {
      Tiles::template load<4>(from, x.ld);
      Tiles::template load<6>(w, kRow);
      Tiles::template dot<0, 4, 6>();
      Tiles::template zero<6>();
      if constexpr (B > 1) {
        Tiles::template load<7>(w + kTileBytes, kRow);
        Tiles::template dot<1, 4, 7>();
        Tiles::template zero<7>();
      }
      if constexpr (B > 2) {
        Tiles::template load<6>(w + 2 * kTileBytes, kRow);
        Tiles::template dot<2, 4, 6>();
        Tiles::template zero<6>();
      }
      if constexpr (B > 3) {
        Tiles::template load<7>(w + 3 * kTileBytes, kRow);
        Tiles::template dot<3, 4, 7>();
        Tiles::template zero<7>();
      }
      Tiles::template zero<4>();
      if (streamed)
        for (int64_t i = 0; i < next; i += kTileBytes) __builtin_prefetch(w + kStreamAhead + i, 0, 3);
    }
  }
  const int64_t stride = ld * static_cast<int64_t>(sizeof(int32_t));
  Tiles::template store<0>(sums, stride);
  if constexpr (B > 1) Tiles::template store<1>(sums + 16, stride);
  if constexpr (B > 2) Tiles::template store<2>(sums + 32, stride);
  if constexpr (B > 3) Tiles::template store<3>(sums + 48, stride);
}

// A group of weights, and whether its weight is streamed.
struct Group {
  const int8_t* w;
  int64_t columns;
  bool streamed;
};

// R tiles of rows past the B blocks of a group.
template <class Tiles, int R, int B>
void products(const Operand (&x)[2], const Group& group, const Reads& reads, int32_t* sums, int64_t ld, int64_t down) {
  constexpr int64_t kRow = B * kTileBytes;
  if constexpr (R == 1) return product_of_one<Tiles, B>(x[0], group.w, reads, group.streamed, sums, ld);
  if constexpr (B >= 2) product_of_two<Tiles, 2>(x, {group.w, kRow}, reads, sums, ld, down);
  if constexpr (B == 4) product_of_two<Tiles, 2>(x, {group.w + 2 * kTileBytes, kRow}, reads, sums + 32, ld, down);
  if constexpr (B % 2) product_of_two<Tiles, 1>(x, {group.w + (B - 1) * kTileBytes, kRow}, reads, sums + (B - 1) * 16, ld, down);
}

// Rows of sums to where `out` wants them.
template <int B, class Out>
void put(const Out& out, const int32_t* sums, int64_t rows, int64_t columns) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) out.at(row, 0).template put<4, B>(sums + row * B * 16, columns);
  for (; row < rows; ++row) out.at(row, 0).template put<1, B>(sums + row * B * 16, columns);
}

// R tiles of rows from `first` on, and a group of B blocks. `out` is at row 0 and the group's first output.
template <class Tiles, int R, int B, class Rows, class Out>
void leave(const Rows& rows, int64_t first, const Group& group, const Reads& reads, const Out& out) {
  const Operand x[2] = {rows.at(first), rows.at(first + R - 1)};
  if constexpr (std::is_same_v<Rows, MatrixTiles>)
    if (group.columns >= B * 16 && out.whole_rows()) {
      const int64_t to = rows.first_row(first), second = rows.first_row(first + R - 1);
      return products<Tiles, R, B>(x, group, reads, out.at(to, 0).whole_rows(), out.ld, (second - to) * out.ld);
    }
  for (int64_t t = 0; t < R; ++t)
    rows.each_run(first + t, [&](int64_t, int64_t to, int64_t count) {
      for (int64_t row = to; row < to + count; ++row) expect<Tiles>(out.at(row, 0));
    });
  alignas(64) int32_t sums[R * kTileRows * B * 16];
  const int64_t down = rows.size * B * 16, columns = std::min<int64_t>(group.columns, B * 16);
  products<Tiles, R, B>(x, group, reads, sums, B * 16, down);
  for (int64_t t = 0; t < R; ++t)
    rows.each_run(first + t, [&](int64_t row, int64_t to, int64_t count) {
      put<B>(out.at(to, 0), sums + t * down + row * B * 16, count, columns);
    });
}

// Tiles [first, last) of rows past a group of `blocks` blocks.
template <class Tiles, class Rows, class Out, int B = 4>
void past_group(int blocks, const Rows& rows, int64_t first, int64_t last, const Group& group, const Reads& reads, const Out& out) {
  if constexpr (B > 1)
    if (blocks < B) return past_group<Tiles, Rows, Out, B - 1>(blocks, rows, first, last, group, reads, out);
  for (; first + 2 <= last; first += 2) leave<Tiles, 2, B>(rows, first, group, reads, out);
  if (first < last) leave<Tiles, 1, B>(rows, first, group, reads, out);
}

// Groups [first, last) of a weight (n, k), of `depth` bytes to an output.
template <class Arch>
struct Groups {
  const int8_t* packed;
  int64_t n, depth, first, last;
  bool backwards = false;

  // visit(the first output, blocks, weights)
  template <class Visit>
  void each(const Visit& visit) const {
    for (int64_t i = first; i < last; ++i) {
      const int64_t n0 = (backwards ? first + last - 1 - i : i) * tile::kGroup<Arch>;
      visit(n0, tile::blocks_of<Arch>(n, n0), packed + n0 * depth);
    }
  }
};

template <class Tiles, class Arch, class Rows, class Out>
void all_tiles(const Groups<Arch>& groups, const Rows& rows, const Reads& reads, const Out& out) {
  static_assert(Arch::kLanes == 16 && Arch::kBlocks == 4 && Arch::kStep == 4);
  const int64_t weight = groups.n * groups.depth;
  const bool stays = weight <= kCachedWeight, streamed = weight > kStreamedWeight;
  const int64_t at_once = stays ? std::max<int64_t>(2, kCachedRows / (groups.depth * rows.size) / 2 * 2) : rows.count;
  configure<Tiles>(rows.size, reads.depth.step);
  for (int64_t begin = 0; begin < rows.count; begin += at_once)
    groups.each([&](int64_t n0, int blocks, const int8_t* w) {
      const Group group{w, groups.n - n0, streamed};
      past_group<Tiles>(blocks, rows, begin, std::min(rows.count, begin + at_once), group, reads, out.at(0, n0));
    });
  Tiles::release();  // other libraries have tiles too, and a new thread would inherit this
}

template <class Tiles, class Arch, class Out>
void in_tiles(const Out& out, const uint8_t* x, int64_t ldx, int64_t m, const Groups<Arch>& groups, int64_t k) {
  const Depth depth(k);
  const int64_t start = 0;
  all_tiles<Tiles, Arch>(groups, MatrixTiles(x, ldx, m, k, depth), Reads{depth, &start, 1}, out);
}

// run(n0, w, n, first, last) for calls of a table of `Arch` that do groups together: groups [first, last) of n outputs from n0 on,
// whose weights are at w. One call where that table packs an output in as many bytes, else one for each group.
template <class Arch, class Run>
void each_call(const Groups<Arch>& groups, int64_t k, const Run& run) {
  if (groups.depth == tile::ceil_div(k, Arch::kStep) * Arch::kStep)
    return run(0, groups.packed, groups.n, groups.first, groups.last);
  groups.each([&](int64_t n0, int, const int8_t* w) { run(n0, w, groups.n - n0, 0, 1); });
}

Requantize from_output(Requantize by, int64_t n0) {
  by.offset += n0, by.multiplier += n0;
  return by;
}

// `vectors` is the table of `Arch`. Another file's, not tiles of this one: those would be in the library twice.
template <class Tiles, class Arch, const NativeGemm& vectors>
struct Gemm {
  static int64_t packed_bytes(int64_t n, int64_t k) { return tile::packed_bytes<Arch>(n, Depth(k).bytes()); }
  static void pack(const int8_t* weight, int64_t n, int64_t k, int8_t* packed) {
    const int64_t depth = Depth(k).bytes();
    FileBuffer<int8_t> buffer;
    int8_t* const filled = buffer.get(n * depth);
    for (int64_t j = 0; j < n; ++j) {
      std::copy_n(weight + j * k, k, filled + j * depth);  // of no weights from the null pointer too
      std::fill_n(filled + j * depth + k, depth - k, int8_t{0});
    }
    tile::pack<Arch>(filled, n, depth, packed);
  }
  static void run(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k, int32_t* acc,
                  int64_t ldacc, int64_t first, int64_t last, bool backwards) {
    const Groups<Arch> groups{packed, n, Depth(k).bytes(), first, last, backwards};
    if (pays(m, k, n)) return in_tiles<Tiles, Arch>(tile::Sums<Arch>{acc, ldacc}, x, ldx, m, groups, k);
    each_call(groups, k, [&](int64_t n0, const int8_t* w, int64_t outputs, int64_t begin, int64_t end) {
      vectors.run(x, ldx, m, w, outputs, k, acc + n0, ldacc, begin, end, backwards);
    });
  }
  static void run_u8(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k,
                     const Requantize& by, uint8_t* out, int64_t ldout, int64_t first, int64_t last) {
    const Groups<Arch> groups{packed, n, Depth(k).bytes(), first, last};
    // A thread's share of what pays as a whole may be few rows: tiles add their residual too, and vectors do not.
    if (by.residual || pays(m, k, n))
      return with_bytes<Arch>(by, out, ldout, [&](const auto& bytes) { in_tiles<Tiles, Arch>(bytes, x, ldx, m, groups, k); });
    each_call(groups, k, [&](int64_t n0, const int8_t* w, int64_t outputs, int64_t begin, int64_t end) {
      vectors.run_u8(x, ldx, m, w, outputs, k, from_output(by, n0), out + n0, ldout, begin, end);
    });
  }
  static bool takes_whole(int64_t m, int64_t n, int64_t k) { return pays(m, k, n); }
  static void run_f32(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k,
                      const Requantize& by, float* out, int64_t ldout, int64_t first, int64_t last) {
    const Groups<Arch> groups{packed, n, Depth(k).bytes(), first, last};
    if (pays(m, k, n)) return in_tiles<Tiles, Arch>(tile::Reals<Arch>{&by, out, ldout}, x, ldx, m, groups, k);
    each_call(groups, k, [&](int64_t n0, const int8_t* w, int64_t outputs, int64_t begin, int64_t end) {
      vectors.run_f32(x, ldx, m, w, outputs, k, from_output(by, n0), out + n0, ldout, begin, end);
    });
  }
  // In vectors: for layers of so few values that tiles do not pay.
  static void run_pieces_u8(const uint8_t* const* rows, const Pieces& pieces, int64_t m, const int8_t* packed, int64_t n,
                            const Requantize& by, uint8_t* out, int64_t ldout) {
    const int64_t k = tile::depth_of<Arch>(pieces);
    const Groups<Arch> groups{packed, n, Depth(k).bytes(), 0, ceil_div(n, tile::kGroup<Arch>)};
    each_call(groups, k, [&](int64_t n0, const int8_t* w, int64_t outputs, int64_t begin, int64_t end) {
      const int64_t of_call = std::min(outputs, (end - begin) * tile::kGroup<Arch>);
      vectors.run_pieces_u8(rows, pieces, m, w, of_call, from_output(by, n0), out + n0, ldout);
    });
  }
  // Lines that fill less than 3/4 of their tiles are better copied together.
  static bool serves_image(const ImageRows& rows, int64_t n) {
    const ImageTiles tiles(rows);
    return Depth::filling(rows.pieces.bytes).steps > 0 && tiles.size * 4 >= kTileRows * 3 &&
           pays(rows.lines * rows.width, tile::depth_of<Arch>(rows.pieces), n);
  }
  static void run_image_u8(const ImageRows& rows, const int8_t* packed, int64_t n, const Requantize& by, uint8_t* out,
                           int64_t ldout, int64_t first, int64_t last) {
    const Groups<Arch> groups{packed, n, Depth(tile::depth_of<Arch>(rows.pieces)).bytes(), first, last};
    const Reads reads{Depth::filling(rows.pieces.bytes), rows.pieces.starts, rows.pieces.count};
    with_bytes<Arch>(by, out, ldout, [&](const auto& bytes) { all_tiles<Tiles, Arch>(groups, ImageTiles(rows), reads, bytes); });
  }
};

template <class Tiles, class Arch, const NativeGemm& vectors>
constexpr NativeGemm table(const char* route) {
  using G = Gemm<Tiles, Arch, vectors>;
  return {route,      tile::kGroup<Arch>,  &G::packed_bytes, &G::pack,        &G::run, &G::run_u8,
          &G::run_f32, &G::run_pieces_u8, &G::takes_whole,  &G::serves_image, &G::run_image_u8};
}

}  // namespace
}  // namespace octet::amx

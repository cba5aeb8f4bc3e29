// Products of many rows with a narrow weight whose scales are by group, in the tiles of AMX; written once over a policy of tiles
// (amx_tiles.h) and an `Arch` of narrow_loop.h. What has few rows, or sums, is left to the table of that Arch.
//
// The weight of a unit is unpacked once for all rows of a call. A tile of sums is what 16 rows and 16 outputs have of one group, so it
// leaves the tiles after a step or a few, and its reals are added up in vectors: in turns, the product of a group, the store of the
// one before, and the sums of the one kTiles before, so that none waits for another.
#pragma once

#include "core/gemm/amx_tiles.h"
#include "core/gemm/narrow_loop.h"

namespace octet::amx {
namespace {

constexpr int kTiles = 4;  // of sums

// From which on tiles are faster than vectors: a unit is unpacked in about the time of the products of 16 rows, and while it is, nothing
// waits for the next one's memory (measured from 8 to 64 rows on an Emerald Rapids).
constexpr int64_t kLeastRows = 32;

// `vectors` is the table of `Arch`.
template <class Tiles, class A, const NativeNarrow& vectors>
struct NarrowTiles {
  using Loop = NarrowLoop<A>;
  using Ints = typename Loop::Ints;
  using Floats = typename Loop::Floats;
  using Reals = Floats[kTileRows][Loop::kPieces];
  static constexpr int kSums = kTileRows * static_cast<int>(kNarrowPanel);  // of a tile

  // What a product reads: 16 rows of activations and the 16 outputs of a panel.
  struct Operands {
    const int8_t* x;
    int64_t ldx;
    const int8_t* w;
    int64_t ldw, step, steps;  // steps of a group, which are equal and at most a tile's width
  };

  // Of group g, in tile T.
  template <int T>
  static OCTET_TILE_INLINE void product(const Operands& of, int64_t g) {
    constexpr int X = 4 + T % 2, W = 6 + T % 2;
    Tiles::template zero<T>();
    const int8_t* x = of.x + g * of.steps * of.step;
    const int8_t* w = of.w + g * of.steps * of.step / 4 * of.ldw;
    for (int64_t s = 0; s < of.steps; ++s, x += of.step, w += of.step / 4 * of.ldw) {
      Tiles::template load<X>(x, of.ldx);
      Tiles::template load<W>(w, of.ldw);
      Tiles::template signed_dot<T, X, W>();
      Tiles::template zero<X>();  // which gives back its register (tile_amx.h)
      Tiles::template zero<W>();
    }
  }

  // Where the sums of 16 rows belong.
  struct Place {
    int64_t row, panel;
    int64_t left;  // rows from there on: as many as a tile has, or fewer
  };

  template <bool zeros>
  static OCTET_TILE_INLINE void add(const NarrowWeight& w, const NarrowRows& rows, const Place& at, int64_t g, const int32_t* sums,
                                    Reals& reals) {
    const int64_t groups = w.k / w.group, first = Loop::place_of(at.panel, g, groups);
#pragma GCC unroll 4
    for (int piece = 0; piece < Loop::kPieces; ++piece) {
      const int64_t place = first + piece * Loop::kLanes;
      const Floats scale = Loop::scale_of(w, place);
      Ints off{};  // of the zero points from the middle, around which the sums are
      if constexpr (zeros) off = A::widened(w.zero_points + place) - (1 << (w.bits - 1));
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) {
        Ints whole;
        std::memcpy(&whole, sums + i * kNarrowPanel + piece * Loop::kLanes, sizeof whole);
        if constexpr (zeros) whole -= off * rows.sums[(at.row + std::min<int64_t>(i, at.left - 1)) * groups + g];
        reals[i][piece] = reals[i][piece] + __builtin_convertvector(whole, Floats) * scale;
      }
    }
  }

  // The product of group g goes to tile T, the sums of the one before to memory, and those of kTiles before to the reals.
  template <bool zeros, int T>
  static OCTET_TILE_INLINE void turn(const NarrowWeight& w, const NarrowRows& rows, const Place& at, const Operands& of, int64_t g,
                                     int32_t* sums, Reals& reals) {
    const int64_t groups = w.k / w.group;
    const auto room = [&](int64_t group) { return sums + group % (2 * kTiles) * kSums; };
    if (g < groups) product<T>(of, g);
    if (g > 0 && g <= groups) Tiles::template store<(T + kTiles - 1) % kTiles>(room(g - 1), kTileBytes);
    if (g >= kTiles && g < groups + kTiles) add<zeros>(w, rows, at, g - kTiles, room(g - kTiles), reals);
  }

  template <bool zeros>
  static void tile(const NarrowWeight& w, const NarrowRows& rows, const NarrowOut& out, const Place& at, const Operands& of) {
    alignas(64) int32_t sums[2 * kTiles * kSums];
    Reals reals;
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 4
      for (int piece = 0; piece < Loop::kPieces; ++piece) reals[i][piece] = Floats{};
    for (int64_t g = 0; g < w.k / w.group + kTiles; g += kTiles) {
      turn<zeros, 0>(w, rows, at, of, g, sums, reals);
      turn<zeros, 1>(w, rows, at, of, g + 1, sums, reals);
      turn<zeros, 2>(w, rows, at, of, g + 2, sums, reals);
      turn<zeros, 3>(w, rows, at, of, g + 3, sums, reals);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      Floats row[Loop::kPieces];  // a copy, for what is put may be a part of it: the others then need no place in memory
#pragma GCC unroll 4
      for (int piece = 0; piece < Loop::kPieces; ++piece) row[piece] = reals[i][piece];
      if (i < at.left) Loop::put_reals(w, rows, out, at.row + i, at.panel, row);
    }
  }

  template <bool zeros>
  static void unit(const NarrowWeight& w, const NarrowRows& rows, const NarrowOut& out, int64_t index, const Operands& of_unit) {
    const int64_t first = index * Loop::kUnitPanels, panels = (w.n + kNarrowPanel - 1) / kNarrowPanel;
    const int64_t count = std::min(Loop::kUnitPanels, panels - first);
    Operands of = of_unit;
    of.ldw = count * kTileBytes;
    for (int64_t row = 0; row < rows.m; row += kTileRows)
      for (int64_t p = 0; p < count; ++p) {
        of.x = rows.x + row * rows.ld, of.w = of_unit.w + p * kTileBytes;
        tile<zeros>(w, rows, out, {row, first + p, std::min<int64_t>(kTileRows, rows.m - row)}, of);
      }
  }

  // Equal steps of at most a tile's width that make up a group, which has whole blocks.
  static int64_t step_of(int64_t group) { return group % kTileBytes == 0 ? kTileBytes : kNarrowBlock; }

  // A load of a tile whose rows lie across two lines takes twice as long.
  static int8_t* aligned(int8_t* memory) { return memory + -reinterpret_cast<uintptr_t>(memory) % kTileBytes; }

  static bool takes_whole(const NarrowWeight& w, int64_t rows) { return w.scales && rows >= kLeastRows; }

  static void run(const NarrowWeight& w, const NarrowRows& rows, const NarrowOut& out, int64_t first, int64_t last,
                  bool backwards) {
    if (!takes_whole(w, rows.m)) return vectors.run(w, rows, out, first, last, backwards);
    thread_local FileBuffer<int8_t>* own = nullptr;
    int8_t* const unpacked = aligned(of_thread(own).get(kNarrowUnit * w.k + kTileBytes));
    const int64_t step = step_of(w.group);
    configure<Tiles>(kTileRows, step);
    for (int64_t i = first; i < last; ++i) {
      const int64_t index = backwards ? first + last - 1 - i : i;
      vectors.unpack(w, index, unpacked);
      const Operands of{nullptr, rows.ld, unpacked, 0, step, w.group / step};
      w.zero_points ? unit<true>(w, rows, out, index, of) : unit<false>(w, rows, out, index, of);
    }
    Tiles::release();
  }

  static void prepare(const uint8_t* q, int64_t k, int64_t group, int8_t* x, int32_t* sums) {
    vectors.prepare(q, k, group, x, sums);
  }
  static void unpack(const NarrowWeight& w, int64_t unit, int8_t* to) { vectors.unpack(w, unit, to); }
};

template <class Tiles, class A, const NativeNarrow& vectors>
constexpr NativeNarrow narrow_table(const char* route) {
  using T = NarrowTiles<Tiles, A, vectors>;
  return {route, &T::prepare, &T::run, &T::unpack, &T::takes_whole};
}

}  // namespace
}  // namespace octet::amx

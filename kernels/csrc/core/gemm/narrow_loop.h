// The products of narrow weights, written once over an instruction set's dot product.
//
// An `Arch` says: kBytes (of its vectors), kPanels (panels that share a broadcast activation), kAhead (bytes before a single row
// reads them that they are asked for, or 0 where the CPU does so by itself), kSets (independent sums of a single
// row, to cover the latency), kRows (rows of a tile of many), kManyRows (from which on integers are unpacked to memory first, or 0
// where it is done in registers for any number of rows), kWidePanels (of a tile then), Partial (sums of a block while they are formed),
// begin, dot and end, `widened` (numbers in memory as int32), and where an instruction does it `reals` (of halves in memory). `dot`
// multiplies bytes u of [0, 15] and signed bytes x, four neighbours to an int32 or two to an int16: 8 steps of a block are at most
// 8 * 2 * 15 * 128 = 30720, which fits.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/cpu/file_buffer.h"
#include "core/cpu/of_thread.h"
#include "core/gemm/native_narrow.h"

namespace octet {
namespace {

#define OCTET_UNROLL _Pragma("GCC unroll 16")
#define OCTET_INLINE inline __attribute__((always_inline))
#define OCTET_LAMBDA __attribute__((always_inline))

template <int kBytes>
struct NarrowVectors {
  typedef uint8_t Bytes __attribute__((vector_size(kBytes)));
  typedef uint16_t Words __attribute__((vector_size(kBytes)));
  typedef int32_t Ints __attribute__((vector_size(kBytes)));
  typedef float Floats __attribute__((vector_size(kBytes)));
};

template <class A>
struct NarrowLoop {
  using V = NarrowVectors<A::kBytes>;
  using Bytes = typename V::Bytes;
  using Words = typename V::Words;
  using Ints = typename V::Ints;
  using Floats = typename V::Floats;
  static constexpr int kPieces = 64 / A::kBytes, kLanes = A::kBytes / 4, kSteps = 8;
  static constexpr int64_t kUnitPanels = kNarrowUnit / kNarrowPanel, kVector = kNarrowUnit * 4;

  // What becomes of sums.
  struct Sums {
    static constexpr bool reals = false, zeros = false;
  };
  struct Reals {
    static constexpr bool reals = true, zeros = false;
  };
  struct RealsWithZeros {
    static constexpr bool reals = true, zeros = true;
  };

  // fn(row, panel, piece), written out.
  template <int M, int P, class Fn>
  static OCTET_INLINE void each(const Fn& fn) {
    OCTET_UNROLL
    for (int i = 0; i < M; ++i)
      OCTET_UNROLL
      for (int p = 0; p < P; ++p)
        OCTET_UNROLL
        for (int piece = 0; piece < kPieces; ++piece) fn(i, p, piece);
  }

  static OCTET_INLINE Bytes load(const uint8_t* from) {
    Bytes v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  template <int n>
  static OCTET_INLINE Bytes down(Bytes v, int mask) {
    return (Bytes)((Words)v >> n & (Words{} + static_cast<uint16_t>(mask * 0x101)));
  }
  static OCTET_INLINE Bytes broadcast(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return (Bytes)(Ints{} + four);
  }

  // The integers of step s, four inputs of each output, from a block's vectors of one panel; `raised`: where they lie in their bytes, so
  // that those of odd steps are 16 times as large.
  template <int kBits, int s, bool raised = false>
  static OCTET_INLINE Bytes field(const uint8_t* block, int piece) {
    const uint8_t* const at = block + piece * A::kBytes;
    if constexpr (raised && s % 2) return load(at + s / 2 * kVector) & static_cast<uint8_t>(0xf0);
    if constexpr (kBits == 4) return down<s % 2 * 4>(load(at + s / 2 * kVector), 15);
    const Bytes low = down<s % 4 * 2>(load(at + s / 4 * kVector), 3);
    if constexpr (kBits == 2) return low;
    const Bytes high = down<s>(load(at + 2 * kVector), 1);
    return low | (Bytes)((Words)high << 2);
  }

  template <class Fn, int... s>
  static OCTET_INLINE void each_step(const Fn& fn, std::integer_sequence<int, s...>) {
    (fn(std::integral_constant<int, s>{}), ...);
  }

  static const uint8_t* panel_bytes(const NarrowWeight& w, int64_t panel) {
    const int64_t unit = panel / kUnitPanels, beside = panel % kUnitPanels * 64;
    return (unit < w.n / kNarrowUnit ? w.bytes + unit * kNarrowUnit * (w.k * w.bits / 8) : w.tail) + beside;
  }

  // Of the first scale of a panel in a group.
  static OCTET_INLINE int64_t place_of(int64_t panel, int64_t group, int64_t groups) {
    return (panel / kUnitPanels * groups + group) * kNarrowUnit + panel % kUnitPanels * kNarrowPanel;
  }
  static OCTET_INLINE Floats scale_of(const NarrowWeight& w, int64_t place) {
    Floats scale;
    if (w.half_scales) {
      const uint16_t* const halves = static_cast<const uint16_t*>(w.scales) + place;
      if constexpr (requires { A::reals(halves); })
        return A::reals(halves);
      else  // normal ones: exponent and mantissa in their places, and 112 between the exponents' middles
        return (Floats)(A::widened(halves) << 13) * 0x1p112f;
    }
    std::memcpy(&scale, static_cast<const float*>(w.scales) + place, sizeof scale);
    return scale;
  }

  // What the sums of a group and row begin with: around the middle, where no zero point says otherwise.
  template <class Kind>
  static OCTET_INLINE Ints first_of(const NarrowRows& rows, int64_t index) {
    if constexpr (Kind::reals && !Kind::zeros)
      return Ints{} + rows.starts[index];
    else
      return Ints{};
  }
  // And such sums around their zero points.
  template <class Kind>
  static OCTET_INLINE Ints centred(const NarrowWeight& w, int64_t place, Ints sums, int32_t x_sum) {
    if constexpr (Kind::zeros)
      return sums - A::widened(w.zero_points + place) * x_sum;
    else
      return sums;
  }

  // Tiles of rows enough that the products hide the time of memory.
  template <int M>
  static constexpr bool kTall = A::kManyRows == 0 && M == A::kRows;

  // Sixteen sums or reals of an output row to memory, as many as there are.
  template <class T, class Vector>
  static OCTET_INLINE void put(T* row, int64_t n, int64_t panel, const Vector (&values)[kPieces]) {
    const int64_t first = panel * kNarrowPanel, count = std::min(kNarrowPanel, n - first);
    if (count == kNarrowPanel)
      std::memcpy(row + first, values, kNarrowPanel * sizeof(T));
    else
      std::memcpy(row + first, values, count * sizeof(T));
  }

  static OCTET_INLINE void put_sums(const NarrowWeight& w, const NarrowRows& rows, const NarrowOut& out, int64_t m,
                                    int64_t panel, Ints (&sums)[kPieces]) {
    // q = 128 + x, and u = 2**(bits - 1) + weight.
    const int32_t* const row_sums = panel < w.n / kNarrowPanel ? out.row_sums + panel * kNarrowPanel : w.tail_sums;
    OCTET_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      Ints of_row;
      std::memcpy(&of_row, row_sums + i * kLanes, sizeof of_row);
      sums[i] += of_row * 128 - (Ints{} + (rows.sums[m] << (w.bits - 1)));
    }
    put(out.sums + m * out.ld, w.n, panel, sums);
  }

  static OCTET_INLINE void put_reals(const NarrowWeight& w, const NarrowRows& rows, const NarrowOut& out, int64_t m,
                                     int64_t panel, Floats (&reals)[kPieces]) {
    OCTET_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      Floats of_row;
      std::memcpy(&of_row, w.row_reals + panel * kNarrowPanel + i * kLanes, sizeof of_row);
      reals[i] = reals[i] - (Floats{} + static_cast<float>(rows.zero_points[m])) * of_row;
    }
    put(out.reals + m * out.ld, w.n, panel, reals);
  }

  // Rows [m, m + M) times panels [panel, panel + P), unpacked in registers. A block also asks for kBits vectors at `ahead`, where
  // it is not null.
  template <int kBits, class Kind, int M, int P>
  static void tile(const NarrowWeight& w, const NarrowRows& rows, const NarrowOut& out, int64_t m, int64_t panel,
                   const uint8_t* ahead = nullptr) {
    // Of a single row those of odd steps have sums of their own, which are divided by 16 once: 2**31 is more than kMaxK / 2 products of
    // 16 * 15 and -128.
    constexpr int kSets = M == 1 ? A::kSets : 1;
    constexpr bool kRaised = kBits == 4 && kSets == 2;
    const int64_t groups = w.k / w.group, blocks = w.group / kNarrowBlock;
    const uint8_t* bytes = panel_bytes(w, panel);  // the others' lie beside it: they are of one unit
    const int8_t* x = rows.x + m * rows.ld;
    Floats reals[M][P][kPieces];
    each<M, P>([&](int i, int p, int piece) OCTET_LAMBDA { reals[i][p][piece] = Floats{}; });
    for (int64_t g = 0; g < groups; ++g) {
      Ints sums[kSets][M][P][kPieces];
      OCTET_UNROLL
      for (int i = 0; i < M; ++i) {
        const Ints first = first_of<Kind>(rows, (m + i) * groups + g);
        OCTET_UNROLL
        for (int set = 0; set < kSets; ++set)
          each<1, P>([&](int, int p, int piece) OCTET_LAMBDA { sums[set][i][p][piece] = set ? Ints{} : first; });
      }
      for (int64_t b = 0; b < blocks; ++b) {
        typename A::Partial partial[kSets][M][P][kPieces];
        OCTET_UNROLL
        for (int set = 0; set < kSets; ++set)
          each<M, P>([&](int i, int p, int piece) OCTET_LAMBDA { partial[set][i][p][piece] = A::begin(sums[set][i][p][piece]); });
        each_step(
            [&](auto step) OCTET_LAMBDA {
              constexpr int s = decltype(step)::value;
              // What takes fewer registers waits in them.
              if constexpr (M > P * kPieces) {
                Bytes us[P][kPieces];
                each<1, P>([&](int, int p, int piece) OCTET_LAMBDA { us[p][piece] = field<kBits, s, kRaised>(bytes + p * 64, piece); });
                OCTET_UNROLL
                for (int i = 0; i < M; ++i) {
                  const Bytes xs = broadcast(x + i * rows.ld + 4 * s);
                  each<1, P>([&](int, int p, int piece) OCTET_LAMBDA { A::dot(partial[s % kSets][i][p][piece], us[p][piece], xs); });
                }
              } else {
                Bytes xs[M];
                OCTET_UNROLL
                for (int i = 0; i < M; ++i) xs[i] = broadcast(x + i * rows.ld + 4 * s);
                each<1, P>([&](int, int p, int piece) OCTET_LAMBDA {
                  const Bytes u = field<kBits, s, kRaised>(bytes + p * 64, piece);
                  OCTET_UNROLL
                  for (int i = 0; i < M; ++i) A::dot(partial[s % kSets][i][p][piece], u, xs[i]);
                });
              }
            },
            std::make_integer_sequence<int, kSteps>{});
        OCTET_UNROLL
        for (int set = 0; set < kSets; ++set)
          each<M, P>([&](int i, int p, int piece) OCTET_LAMBDA {
            sums[set][i][p][piece] = A::end(sums[set][i][p][piece], partial[set][i][p][piece]);
          });
        if constexpr (M == 1 && A::kAhead > 0)
          OCTET_UNROLL
          for (int p = 0; p < P; ++p)
            OCTET_UNROLL
            for (int v = 0; v < kBits; ++v) __builtin_prefetch(bytes + p * 64 + v * kVector + A::kAhead, 0, 3);
        if constexpr (kTall<M>)
          if (ahead) {
            OCTET_UNROLL
            for (int v = 0; v < kBits; ++v) __builtin_prefetch(ahead + v * 64, 0, 2);
            ahead += kBits * 64;
          }
        bytes += kBits * kVector;
        x += kNarrowBlock;
      }
      if constexpr (kSets == 2)
        each<M, P>([&](int i, int p, int piece) OCTET_LAMBDA {
          sums[0][i][p][piece] += kRaised ? sums[1][i][p][piece] >> 4 : sums[1][i][p][piece];
        });
      if constexpr (!Kind::reals) {  // one group
        for (int i = 0; i < M; ++i)
          for (int p = 0; p < P; ++p) put_sums(w, rows, out, m + i, panel + p, sums[0][i][p]);
        return;
      }
      if constexpr (Kind::reals)
        OCTET_UNROLL
        for (int p = 0; p < P; ++p)
          OCTET_UNROLL
          for (int piece = 0; piece < kPieces; ++piece) {
            const int64_t place = place_of(panel, g, groups) + p * kNarrowPanel + piece * kLanes;
            const Floats scale = scale_of(w, place);
            OCTET_UNROLL
            for (int i = 0; i < M; ++i) {
              const Ints whole = centred<Kind>(w, place, sums[0][i][p][piece], rows.sums[(m + i) * groups + g]);
              reals[i][p][piece] = reals[i][p][piece] + __builtin_convertvector(whole, Floats) * scale;
            }
          }
    }
    for (int i = 0; i < M; ++i)
      for (int p = 0; p < P; ++p) put_reals(w, rows, out, m + i, panel + p, reals[i][p]);
  }

  template <int kBits, class Kind, int M, int P>
  static void tiles(const NarrowWeight& w, const NarrowRows& rows, const NarrowOut& out, int64_t m, int64_t first,
                    int64_t last) {
    int64_t panel = first;
    for (; panel + P <= last; panel += P) tile<kBits, Kind, M, P>(w, rows, out, m, panel);
    for (; panel < last; ++panel) tile<kBits, Kind, M, 1>(w, rows, out, m, panel);
  }

  template <int kBits, class Kind>
  static void few_rows(const NarrowWeight& w, const NarrowRows& rows, const NarrowOut& out, int64_t first, int64_t last) {
    int64_t m = 0;
    // Integers are unpacked beside the products, by units of the CPU that those leave idle. Reals take registers too. The first
    // tiles bring the next unit to the L2 cache, a quarter each: one that had to wait for it would do little else.
    if constexpr (kTall<A::kRows>) {
      constexpr int P = Kind::reals ? A::kPanels / 2 : A::kPanels;
      const int64_t part = w.k / kNarrowBlock * kBits * 64;
      const uint8_t* const unit = panel_bytes(w, first);
      int64_t passes = 0;
      for (; m + A::kRows <= rows.m; m += A::kRows) {
        int64_t panel = first;
        for (; panel + P <= last; panel += P, ++passes)
          tile<kBits, Kind, A::kRows, P>(w, rows, out, m, panel, passes < kUnitPanels ? unit + (kUnitPanels + passes) * part : nullptr);
        for (; panel < last; ++panel) tile<kBits, Kind, A::kRows, 1>(w, rows, out, m, panel);
      }
    }
    for (; m + 4 <= rows.m; m += 4) tiles<kBits, Kind, 4, A::kPanels / 2>(w, rows, out, m, first, last);
    for (; m + 2 <= rows.m; m += 2) tiles<kBits, Kind, 2, A::kPanels>(w, rows, out, m, first, last);
    if (m < rows.m) tiles<kBits, Kind, 1, A::kPanels>(w, rows, out, m, first, last);
  }

  // Many rows: the integers of a chunk of inputs are unpacked once for all of them. Both buffers hold whole panels of a row side by
  // side: the sums of the group so far, and the reals of those before.
  static constexpr int64_t kRowsAtOnce = 96, kChunk = 128;
  static constexpr int W = A::kWidePanels, kWidth = W * static_cast<int>(kNarrowPanel);
  struct Unpacked {
    uint8_t bytes[kChunk * kWidth];  // [step][panel][output][4]
    int32_t sums[kRowsAtOnce * kWidth];
    float reals[kRowsAtOnce * kWidth];
  };

  // A panel's integers less `middle`, `stride` bytes from a step to the next.
  template <int kBits, int middle = 0>
  static void unpack(const uint8_t* from, int64_t blocks, int64_t stride, uint8_t* to) {
    for (int64_t b = 0; b < blocks; ++b, from += kBits * kVector)
      each_step(
          [&](auto step) OCTET_LAMBDA {
            OCTET_UNROLL
            for (int piece = 0; piece < kPieces; ++piece) {
              const Bytes u = field<kBits, decltype(step)::value>(from, piece) - static_cast<uint8_t>(middle);
              std::memcpy(to + piece * A::kBytes, &u, sizeof u);
            }
            to += stride;
          },
          std::make_integer_sequence<int, kSteps>{});
  }

  template <int kBits>
  static void unpack_unit(const NarrowWeight& w, int64_t unit, int8_t* to) {
    const int64_t first = unit * kUnitPanels, panels = (w.n + kNarrowPanel - 1) / kNarrowPanel;
    const int64_t count = std::min(kUnitPanels, panels - first);
    for (int64_t p = 0; p < count; ++p)
      unpack<kBits, 1 << (kBits - 1)>(panel_bytes(w, first + p), w.k / kNarrowBlock, count * 64,
                                      reinterpret_cast<uint8_t*>(to) + p * 64);
  }
  static void unpack_bytes(const NarrowWeight& w, int64_t unit, int8_t* to) {
    return w.bits == 4 ? unpack_unit<4>(w, unit, to) : w.bits == 3 ? unpack_unit<3>(w, unit, to) : unpack_unit<2>(w, unit, to);
  }

  // Where a chunk lies in its group, and the group.
  struct Chunk {
    int64_t panel, group, blocks;
    bool begins, ends;
  };

  template <class Kind, int M>
  static void unpacked_tile(const NarrowWeight& w, const NarrowRows& rows, int64_t m, const int8_t* x, const Chunk& chunk,
                            const uint8_t* u, int32_t* sums_so_far, float* reals) {
    Ints sums[M][W][kPieces];
    if (chunk.begins)
      each<M, W>([&](int i, int p, int piece) OCTET_LAMBDA {
        sums[i][p][piece] = first_of<Kind>(rows, (m + i) * (w.k / w.group) + chunk.group);
      });
    else
      each<M, W>([&](int i, int p, int piece) OCTET_LAMBDA {
        std::memcpy(&sums[i][p][piece], sums_so_far + i * kWidth + p * kNarrowPanel + piece * kLanes, sizeof(Ints));
      });
    for (int64_t b = 0; b < chunk.blocks; ++b) {
      typename A::Partial partial[M][W][kPieces];
      each<M, W>([&](int i, int p, int piece) OCTET_LAMBDA { partial[i][p][piece] = A::begin(sums[i][p][piece]); });
#pragma GCC unroll 2
      for (int s = 0; s < kSteps; ++s, x += 4, u += W * 64) {
        Bytes of_step[W][kPieces];
        each<1, W>([&](int, int p, int piece) OCTET_LAMBDA { of_step[p][piece] = load(u + p * 64 + piece * A::kBytes); });
        OCTET_UNROLL
        for (int i = 0; i < M; ++i) {
          const Bytes xs = broadcast(x + i * rows.ld);
          each<1, W>([&](int, int p, int piece) OCTET_LAMBDA { A::dot(partial[i][p][piece], of_step[p][piece], xs); });
        }
      }
      each<M, W>([&](int i, int p, int piece) OCTET_LAMBDA { sums[i][p][piece] = A::end(sums[i][p][piece], partial[i][p][piece]); });
    }
    if (!Kind::reals || !chunk.ends)
      return each<M, W>([&](int i, int p, int piece) OCTET_LAMBDA {
        std::memcpy(sums_so_far + i * kWidth + p * kNarrowPanel + piece * kLanes, &sums[i][p][piece], sizeof(Ints));
      });
    if constexpr (Kind::reals) {
      const int64_t groups = w.k / w.group;
      each<1, W>([&](int, int p, int piece) OCTET_LAMBDA {
        const int64_t place = place_of(chunk.panel + p, chunk.group, groups) + piece * kLanes;
        const Floats scale = scale_of(w, place);
        OCTET_UNROLL
        for (int i = 0; i < M; ++i) {
          float* const at = reals + i * kWidth + p * kNarrowPanel + piece * kLanes;
          Floats real = Floats{};
          if (chunk.group) std::memcpy(&real, at, sizeof real);
          const Ints whole = centred<Kind>(w, place, sums[i][p][piece], rows.sums[(m + i) * groups + chunk.group]);
          real = real + __builtin_convertvector(whole, Floats) * scale;
          std::memcpy(at, &real, sizeof real);
        }
      });
    }
  }

  template <class Kind, int M = A::kRows>
  static void unpacked_rows(const NarrowWeight& w, const NarrowRows& rows, int64_t m, int64_t count, const int8_t* x,
                            const Chunk& chunk, Unpacked& space, int64_t done = 0) {
    for (; done + M <= count; done += M)
      unpacked_tile<Kind, M>(w, rows, m + done, x + done * rows.ld, chunk, space.bytes, space.sums + done * kWidth,
                             space.reals + done * kWidth);
    if constexpr (M > 1) unpacked_rows<Kind, M - 1>(w, rows, m, count, x, chunk, space, done);
  }

  // Of W panels.
  template <int kBits, class Kind>
  static void many_rows(const NarrowWeight& w, const NarrowRows& rows, const NarrowOut& out, int64_t panel, Unpacked& space) {
    const int64_t groups = w.k / w.group;
    for (int64_t m0 = 0; m0 < rows.m; m0 += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, rows.m - m0);
      for (int64_t g = 0; g < groups; ++g)
        for (int64_t done = 0; done < w.group; done += kChunk) {
          const int64_t first = g * w.group + done, inputs = std::min(kChunk, w.group - done);
          for (int p = 0; p < W; ++p)
            unpack<kBits>(panel_bytes(w, panel + p) + first / kNarrowBlock * kBits * kVector, inputs / kNarrowBlock, W * 64,
                          space.bytes + p * 64);
          const Chunk chunk{panel, g, inputs / kNarrowBlock, done == 0, done + inputs == w.group};
          unpacked_rows<Kind>(w, rows, m0, count, rows.x + m0 * rows.ld + first, chunk, space);
        }
      for (int64_t m = 0; m < count; ++m)
        for (int p = 0; p < W; ++p) {
          if constexpr (Kind::reals) {
            Floats reals[kPieces];
            std::memcpy(reals, space.reals + m * kWidth + p * kNarrowPanel, sizeof reals);
            put_reals(w, rows, out, m0 + m, panel + p, reals);
          } else {
            Ints sums[kPieces];
            std::memcpy(sums, space.sums + m * kWidth + p * kNarrowPanel, sizeof sums);
            put_sums(w, rows, out, m0 + m, panel + p, sums);
          }
        }
    }
  }

  template <int kBits, class Kind>
  static void unit(const NarrowWeight& w, const NarrowRows& rows, const NarrowOut& out, int64_t index) {
    const int64_t panels = (w.n + kNarrowPanel - 1) / kNarrowPanel, last = std::min((index + 1) * kUnitPanels, panels);
    int64_t panel = index * kUnitPanels;
    if constexpr (A::kManyRows > 0)
      if (rows.m >= A::kManyRows) {
        thread_local FileBuffer<Unpacked>* own = nullptr;
        Unpacked& unpacked = *of_thread(own).get(1);
        for (; panel + W <= last; panel += W) many_rows<kBits, Kind>(w, rows, out, panel, unpacked);
      }
    if (panel < last) few_rows<kBits, Kind>(w, rows, out, panel, last);
  }

  template <int kBits>
  static auto unit_of(const NarrowWeight& w) {
    return !w.scales ? &unit<kBits, Sums> : w.zero_points ? &unit<kBits, RealsWithZeros> : &unit<kBits, Reals>;
  }

  static void run(const NarrowWeight& w, const NarrowRows& rows, const NarrowOut& out, int64_t first, int64_t last,
                  bool backwards) {
    const auto one = w.bits == 4 ? unit_of<4>(w) : w.bits == 3 ? unit_of<3>(w) : unit_of<2>(w);
    for (int64_t i = first; i < last; ++i) one(w, rows, out, backwards ? first + last - 1 - i : i);
  }

  static void prepare(const uint8_t* q, int64_t k, int64_t group, int8_t* x, int32_t* sums) {
    for (int64_t i = 0; i < k; i += kNarrowBlock) {
      int32_t sum = 0;
      for (int64_t j = i; j < i + kNarrowBlock; ++j) {
        x[j] = static_cast<int8_t>(q[j] ^ 0x80);
        sum += static_cast<int32_t>(q[j]) - 128;
      }
      int32_t& of_group = sums[i / group];
      of_group = i % group == 0 ? sum : of_group + sum;
    }
  }
};

#undef OCTET_UNROLL
#undef OCTET_INLINE
#undef OCTET_LAMBDA

template <class A>
constexpr NativeNarrow narrow_table(const char* route) {
  return {route, &NarrowLoop<A>::prepare, &NarrowLoop<A>::run, &NarrowLoop<A>::unpack_bytes, nullptr};
}

}  // namespace
}  // namespace octet

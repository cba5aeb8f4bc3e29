// The register-tiled GEMM, written once over the instruction set's three operations.
//
// Where a tile's sums go is an `Out`: to memory as they are, or requantised on the way.
//
// An `Arch` says: Acc (a vector of kLanes int32), kLanes, kStep (how many k one dot product takes), kBlocks (vectors of
// outputs per group), kRows (rows per tile), kAccSets (independent sums for short tiles, to cover the latency),
// kGroupsAtOnce (where one row takes several groups of outputs at a time), X (uint8_t, or uint16_t where the activations are widened first), Weight, Activation, and load, broadcast, dot, zero,
// add, store, or a `tile` of its own in place of all that the one here uses; and for equation 7 Rounding (what is the
// same for all channels) and requantize, and where it has one `bytes`, a tile that leaves its registers as bytes. Packed
// layout of a group: [k / kStep][block][lane][kStep], zero where k or n run out. An Arch with a kHead of 4 takes activations
// as x - 128, and a step before the others has what each sum starts from. An X of two bytes is the activation, or what
// `spread` makes of it.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/cpu/file_buffer.h"
#include "core/cpu/of_thread.h"
#include "core/gemm/native_gemm.h"
#include "core/rows/wrapping.h"

namespace octet::tile {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class A>
constexpr int64_t kGroup = static_cast<int64_t>(A::kLanes) * A::kBlocks;

// Blocks of the group that starts at output `n0`: all groups are full but the last.
template <class A>
int blocks_of(int64_t n, int64_t n0) {
  return static_cast<int>(std::min<int64_t>(A::kBlocks, ceil_div(n - n0, A::kLanes)));
}

// Bytes before an output's weights, or none.
template <class A>
constexpr int64_t kHead = 0;
template <class A>
  requires requires { A::kHead; }
constexpr int64_t kHead<A> = A::kHead;

// Steps of an output, those of its head among them.
template <class A>
int64_t steps_of(int64_t k) {
  return ceil_div(kHead<A> + k, A::kStep);
}

template <class A>
int64_t packed_bytes(int64_t n, int64_t k) {
  return ceil_div(n, A::kLanes) * A::kLanes * steps_of<A>(k) * A::kStep;
}

template <class A>
void pack_rows(const int8_t* weight, int64_t n, int64_t k, int8_t* packed) {
  const int64_t steps = ceil_div(k, A::kStep);
  for (int64_t n0 = 0; n0 < n; n0 += kGroup<A>) {
    const int blocks = blocks_of<A>(n, n0);
    for (int64_t s = 0; s < steps; ++s)
      for (int lane = 0; lane < blocks * A::kLanes; ++lane) {
        const int64_t row = n0 + lane, column = s * A::kStep;
        const int64_t count = row < n ? std::min<int64_t>(A::kStep, k - column) : 0;
        // Whole steps at once: products of two activations are packed in every call.
        if (count == A::kStep)
          std::memcpy(packed, weight + row * k + column, A::kStep);
        else
          for (int64_t i = 0; i < A::kStep; ++i) packed[i] = i < count ? weight[row * k + column + i] : 0;
        packed += A::kStep;
      }
  }
}

// A head is 128 times the sum of an output's weights, as int32: what makes up for x - 128, exactly, as both fit int32
// (packed_gemm.h).
template <class A>
void pack(const int8_t* weight, int64_t n, int64_t k, int8_t* packed) {
  if constexpr (kHead<A> == 0) return pack_rows<A>(weight, n, k, packed);
  const int64_t longer = kHead<A> + k;
  FileBuffer<int8_t> buffer;
  int8_t* const rows = buffer.get(n * longer);
  for (int64_t j = 0; j < n; ++j) {
    int32_t start = 0;
    for (int64_t i = 0; i < k; ++i) start += 128 * weight[j * k + i];
    std::memcpy(rows + j * longer, &start, sizeof start);
    std::copy(weight + j * k, weight + (j + 1) * k, rows + j * longer + kHead<A>);
  }
  pack_rows<A>(rows, n, longer, packed);
}

// Sums as they are.
template <class A>
struct Sums {
  int32_t* acc;
  int64_t ld;
  Sums at(int64_t rows, int64_t columns) const { return {acc + rows * ld + columns, ld}; }
  int32_t* whole_rows() const { return acc; }
  template <int M, int B>
  void put(const int32_t* sums, int64_t columns) const {
    for (int64_t m = 0; m < M; ++m) std::memcpy(acc + m * ld, sums + m * B * A::kLanes, columns * sizeof(int32_t));
  }
};

// Equation 7, while the sums are in the L1 cache. Not from registers, but where the instruction set has a tile of its own for
// that: with such code behind the loop, g++ 12 keeps the accumulators in memory inside it, at half the speed.
template <class A>
struct Bytes {
  const Requantize* by;
  // Not a copy in each tile: read as soon as it is written, in parts of other sizes, it would wait for the cache.
  const typename A::Rounding* rounding;
  uint8_t* out;
  int64_t ld, channel = 0;
  Bytes at(int64_t rows, int64_t columns) const {
    return {by, rounding, out + rows * ld + columns, ld, channel + columns};
  }
  int32_t* whole_rows() const { return nullptr; }
  template <int M, int B>
  void put(const int32_t* sums, int64_t columns) const {
    // A copy, because for all the compiler knows a byte that is written may be one of these.
    const typename A::Rounding rounding = *this->rounding;
    const int32_t* offset = by->offset + channel;
    const float* multiplier = by->multiplier + channel;
    constexpr int64_t kColumns = B * A::kLanes;
    if (columns >= kColumns) {
      for (int64_t m = 0; m < M; ++m)
        A::template requantize<B>(sums + m * kColumns, offset, multiplier, rounding, out + m * ld);
      return;
    }
    for (int64_t m = 0; m < M; ++m) {
      alignas(64) uint8_t whole[kColumns];
      A::template requantize<B>(sums + m * kColumns, offset, multiplier, rounding, whole);
      std::memcpy(out + m * ld, whole, columns);
    }
  }
};

template <class T, int count>
struct Lanes {
  typedef T Vector __attribute__((vector_size(count * sizeof(T))));
};

// The real values (sums + offset) * multiplier, in the same way.
template <class A>
struct Reals {
  const Requantize* by;
  float* out;
  int64_t ld, channel = 0;
  Reals at(int64_t rows, int64_t columns) const { return {by, out + rows * ld + columns, ld, channel + columns}; }
  int32_t* whole_rows() const { return nullptr; }
  template <int M, int B>
  void put(const int32_t* __restrict sums, int64_t columns) const {
    const int32_t* __restrict offset = by->offset + channel;
    const float* __restrict multiplier = by->multiplier + channel;
    constexpr int64_t kColumns = B * A::kLanes;
    for (int64_t m = 0; m < M; ++m) {
      float* __restrict row = out + m * ld;
      const int32_t* __restrict sum = sums + m * kColumns;
      if (columns < kColumns)
        for (int64_t j = 0; j < columns; ++j) row[j] = static_cast<float>(wrapped_sum(sum[j], offset[j])) * multiplier[j];
      else if constexpr (kColumns <= 16)
        for (int64_t j = 0; j < kColumns; j += A::kLanes) vector(sum + j, offset + j, multiplier + j, row + j);
      else
        for (int64_t j = 0; j < kColumns; ++j) row[j] = static_cast<float>(wrapped_sum(sum[j], offset[j])) * multiplier[j];
    }
  }

 private:
  // A loop over so few values is unrolled by g++ 12 before it could become vectors, and computes them one by one.
  static void vector(const int32_t* sum, const int32_t* offset, const float* multiplier, float* to) {
    typename Lanes<uint32_t, A::kLanes>::Vector sums, offsets;  // without signs, as in wrapped_sum
    typename Lanes<float, A::kLanes>::Vector factors;
    std::memcpy(&sums, sum, sizeof sums);
    std::memcpy(&offsets, offset, sizeof offsets);
    std::memcpy(&factors, multiplier, sizeof factors);
    const auto exact = __builtin_bit_cast(typename Lanes<int32_t, A::kLanes>::Vector, sums + offsets);
    const auto reals = __builtin_convertvector(exact, decltype(factors)) * factors;
    std::memcpy(to, &reals, sizeof reals);
  }
};

// The accumulators must live in registers, so every loop over them is unrolled.
#define OCTET_UNROLL _Pragma("GCC unroll 16")

// acc (M, B * kLanes), whole vectors. A step also asks for a vector of weights from `ahead`: the first B passes over a
// group's weights bring the next group's to the L2 cache, while a pass that had to wait for them would do little else.
// Behind the last group that is nothing, which a prefetch may ask for. A single row asks for none: it reads weights as
// fast as they come.
template <class A, int M, int B>
void tile(const typename A::X* x, int64_t ldx, const int8_t* w, int64_t steps, int32_t* acc, int64_t ldacc,
          const int8_t* ahead) {
  constexpr int kBytes = A::kLanes * A::kStep;
  constexpr int kSets = M * B * 2 <= A::kAccSets ? 2 : 1;
  typename A::Acc sums[kSets][M][B];
  OCTET_UNROLL
  for (int set = 0; set < kSets; ++set)
    OCTET_UNROLL
    for (int m = 0; m < M; ++m)
      OCTET_UNROLL
      for (int b = 0; b < B; ++b) {
        if constexpr (kHead<A> > 0)
          sums[set][m][b] = set ? A::zero() : A::load(w + b * kBytes);
        else
          sums[set][m][b] = A::zero();
      }
  w += kHead<A> * A::kLanes * B;
  steps -= kHead<A> / A::kStep;
  int64_t s = 0;
  for (; s + kSets <= steps; s += kSets)
    OCTET_UNROLL
    for (int set = 0; set < kSets; ++set) {
      if constexpr (M > 1) __builtin_prefetch(ahead + (s + set) * kBytes, 0, 2);
      // What takes fewer registers waits in them: the activations of all rows, or the weights of all blocks.
      if constexpr (sizeof(typename A::Activation) == sizeof(typename A::Weight)) {
        typename A::Activation xs[M];
        OCTET_UNROLL
        for (int m = 0; m < M; ++m) xs[m] = A::broadcast(x + m * ldx + (s + set) * A::kStep);
        OCTET_UNROLL
        for (int b = 0; b < B; ++b) {
          const typename A::Weight wb = A::load(w + ((s + set) * B + b) * kBytes);
          OCTET_UNROLL
          for (int m = 0; m < M; ++m) sums[set][m][b] = A::dot(sums[set][m][b], xs[m], wb);
        }
      } else {
        typename A::Weight ws[B];
        OCTET_UNROLL
        for (int b = 0; b < B; ++b) ws[b] = A::load(w + ((s + set) * B + b) * kBytes);
        OCTET_UNROLL
        for (int m = 0; m < M; ++m) {
          const typename A::Activation xm = A::broadcast(x + m * ldx + (s + set) * A::kStep);
          OCTET_UNROLL
          for (int b = 0; b < B; ++b) sums[set][m][b] = A::dot(sums[set][m][b], xm, ws[b]);
        }
      }
    }
  for (; s < steps; ++s)
    OCTET_UNROLL
    for (int b = 0; b < B; ++b) {
      const typename A::Weight wb = A::load(w + (s * B + b) * kBytes);
      OCTET_UNROLL
      for (int m = 0; m < M; ++m) sums[0][m][b] = A::dot(sums[0][m][b], A::broadcast(x + m * ldx + s * A::kStep), wb);
    }
  OCTET_UNROLL
  for (int m = 0; m < M; ++m)
    OCTET_UNROLL
    for (int b = 0; b < B; ++b) {
      typename A::Acc sum = sums[0][m][b];
      if constexpr (kSets == 2) sum = A::add(sum, sums[1][m][b]);
      A::store(acc + m * ldacc + b * A::kLanes, sum);
    }
}

// acc (G * kGroup): one row and G whole groups. An activation is broadcast once for all of them, and weights come as G streams.
template <class A, int G>
void tile_of_groups(const typename A::X* x, const int8_t* w, int64_t steps, int32_t* acc) {
  constexpr int kBytes = A::kLanes * A::kStep, B = A::kBlocks;
  const int64_t group = steps * B * kBytes;
  typename A::Acc sums[G][B];
  OCTET_UNROLL
  for (int g = 0; g < G; ++g)
    OCTET_UNROLL
    for (int b = 0; b < B; ++b) {
      if constexpr (kHead<A> > 0)
        sums[g][b] = A::load(w + g * group + b * kBytes);
      else
        sums[g][b] = A::zero();
    }
  for (int64_t s = kHead<A> / A::kStep; s < steps; ++s, x += A::kStep) {
    const typename A::Activation activation = A::broadcast(x);
    OCTET_UNROLL
    for (int g = 0; g < G; ++g)
      OCTET_UNROLL
      for (int b = 0; b < B; ++b) sums[g][b] = A::dot(sums[g][b], activation, A::load(w + g * group + (s * B + b) * kBytes));
  }
  OCTET_UNROLL
  for (int g = 0; g < G; ++g)
    OCTET_UNROLL
    for (int b = 0; b < B; ++b) A::store(acc + (g * B + b) * A::kLanes, sums[g][b]);
}

#undef OCTET_UNROLL

template <class A, int M, int B>
void tile_of(const typename A::X* x, int64_t ldx, const int8_t* w, int64_t steps, int32_t* acc, int64_t ldacc,
             const int8_t* ahead) {
  if constexpr (requires { &A::template tile<M, B>; })
    A::template tile<M, B>(x, ldx, w, steps, acc, ldacc);
  else
    tile<A, M, B>(x, ldx, w, steps, acc, ldacc, ahead);
}

template <class A, int M, int B, class Out>
void tile_to(const typename A::X* x, int64_t ldx, const int8_t* w, int64_t steps, const Out& out, int64_t columns,
             const int8_t* ahead) {
  constexpr int64_t kColumns = B * A::kLanes;
  if constexpr (requires { &A::template bytes<M, B>; } && std::is_same_v<Out, Bytes<A>>) {
    if (out.by->shrinks && steps > 0)
      return A::template bytes<M, B>(x, ldx, w, steps, out.by->offset + out.channel, out.by->multiplier + out.channel,
                                     *out.rounding, out.out, out.ld, columns, ahead);
  }
  if (columns >= kColumns && out.whole_rows()) return tile_of<A, M, B>(x, ldx, w, steps, out.whole_rows(), out.ld, ahead);
  alignas(64) int32_t sums[M * kColumns];
  tile_of<A, M, B>(x, ldx, w, steps, sums, kColumns, ahead);
  out.template put<M, B>(sums, std::min(columns, kColumns));
}

template <class A, int B, class Out, int M = A::kRows>
void rows(const typename A::X* x, int64_t ldx, int64_t m, const int8_t* w, int64_t steps, Out out, int64_t columns,
          int pass = 0) {
  const int64_t part = steps * A::kLanes * A::kStep;
  for (; m >= M; m -= M, x += M * ldx, out = out.at(M, 0), ++pass)
    tile_to<A, M, B>(x, ldx, w, steps, out, columns, pass < B ? w + (B + pass) * part : w);
  if constexpr (M > 1) {
    if (m) rows<A, B, Out, M - 1>(x, ldx, m, w, steps, out, columns, pass);
  }
}

template <class A, class Out, int B = A::kBlocks>
void group(int blocks, const typename A::X* x, int64_t ldx, int64_t m, const int8_t* w, int64_t steps, const Out& out,
           int64_t columns) {
  if (blocks == B) return rows<A, B, Out>(x, ldx, m, w, steps, out, columns);
  if constexpr (B > 1) group<A, Out, B - 1>(blocks, x, ldx, m, w, steps, out, columns);
}

template <class A, int G, class Out>
void groups_of_row(const typename A::X* x, const int8_t* w, int64_t steps, const Out& out) {
  if (out.whole_rows()) return tile_of_groups<A, G>(x, w, steps, out.whole_rows());
  alignas(64) int32_t sums[G * kGroup<A>];
  tile_of_groups<A, G>(x, w, steps, sums);
  for (int64_t g = 0; g < G; ++g) out.at(0, g * kGroup<A>).template put<1, A::kBlocks>(sums + g * kGroup<A>, kGroup<A>);
}

template <class A, class Out>
void run_to(const Out& out, const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k,
            int64_t first, int64_t last, bool backwards = false) {
  const int64_t steps = steps_of<A>(k);
  const typename A::X* rows_x;
  int64_t rows_ld = ldx;
  if constexpr (std::is_same_v<typename A::X, uint8_t>) {
    rows_x = x;
  } else {
    // Once per call rather than once per group of outputs, so that a broadcast yields what a product takes.
    thread_local FileBuffer<typename A::X>* own = nullptr;
    FileBuffer<typename A::X>& buffer = of_thread(own);
    rows_ld = steps * A::kStep - kHead<A>;
    typename A::X* const spread = buffer.get(m * rows_ld);
    for (int64_t i = 0; i < m; ++i) {
      if constexpr (requires { &A::spread; })
        A::spread(x + i * ldx, rows_ld, spread + i * rows_ld);
      else
        std::copy(x + i * ldx, x + i * ldx + rows_ld, spread + i * rows_ld);
    }
    rows_x = spread;
  }
  int64_t i = first;
  if constexpr (requires { A::kGroupsAtOnce; }) {
    constexpr int G = A::kGroupsAtOnce;
    const bool serves = m == 1 && last * kGroup<A> <= n;
    for (; serves && i + G <= last; i += G) {
      const int64_t n0 = (backwards ? first + last - G - i : i) * kGroup<A>;
      groups_of_row<A, G>(rows_x, packed + n0 * steps * A::kStep, steps, out.at(0, n0));
    }
  }
  for (; i < last; ++i) {
    const int64_t n0 = (backwards ? first + last - 1 - i : i) * kGroup<A>;
    const int8_t* w = packed + n0 * steps * A::kStep;
    group<A, Out>(blocks_of<A>(n, n0), rows_x, rows_ld, m, w, steps, out.at(0, n0), n - n0);
  }
}

template <class A>
void run(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k, int32_t* acc,
         int64_t ldacc, int64_t first, int64_t last, bool backwards) {
  run_to<A>(Sums<A>{acc, ldacc}, x, ldx, m, packed, n, k, first, last, backwards);
}

template <class A>
void run_u8(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k, const Requantize& by,
            uint8_t* out, int64_t ldout, int64_t first, int64_t last) {
  const typename A::Rounding rounding(by);
  run_to<A>(Bytes<A>{&by, &rounding, out, ldout}, x, ldx, m, packed, n, k, first, last);
}

template <class A>
void run_f32(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k, const Requantize& by,
             float* out, int64_t ldout, int64_t first, int64_t last) {
  run_to<A>(Reals<A>{&by, out, ldout}, x, ldx, m, packed, n, k, first, last);
}

// Without products of pieces (tile_pieces.h) and of images.
template <class A>
constexpr NativeGemm table(const char* route) {
  return {route, kGroup<A>, &packed_bytes<A>, &pack<A>, &run<A>, &run_u8<A>, &run_f32<A>, nullptr, nullptr, nullptr, nullptr};
}

}  // namespace octet::tile

// The tile of tile.h over rows that lie in pieces: a row of a convolution's kernel is one piece of the image, so nothing is
// gathered first. For tables whose activations are bytes as they come, four to a step.
#pragma once

#include "core/gemm/tile.h"

namespace octet::tile {

#define OCTET_UNROLL _Pragma("GCC unroll 16")

// acc (M, B * kLanes), whole vectors.
template <class A, int M, int B>
void tile_of_pieces(const uint8_t* const* pixels, const Pieces& pieces, const int8_t* w, int32_t* acc) {
  constexpr int kBytes = A::kLanes * A::kStep;
  typename A::Acc sums[M][B];
  OCTET_UNROLL
  for (int m = 0; m < M; ++m)
    OCTET_UNROLL
    for (int b = 0; b < B; ++b) sums[m][b] = A::zero();
  const int64_t steps = ceil_div(pieces.bytes, A::kStep);
  for (int64_t piece = 0; piece < pieces.count; ++piece) {
    const uint8_t* x[M];
    OCTET_UNROLL
    for (int m = 0; m < M; ++m) x[m] = pixels[m] + pieces.starts[piece];
    for (int64_t s = 0; s < steps; ++s, w += B * kBytes) {
      typename A::Activation xs[M];
      OCTET_UNROLL
      for (int m = 0; m < M; ++m) xs[m] = A::broadcast(x[m] + s * A::kStep);
      OCTET_UNROLL
      for (int b = 0; b < B; ++b) {
        const typename A::Weight wb = A::load(w + b * kBytes);
        OCTET_UNROLL
        for (int m = 0; m < M; ++m) sums[m][b] = A::dot(sums[m][b], xs[m], wb);
      }
    }
  }
  OCTET_UNROLL
  for (int m = 0; m < M; ++m)
    OCTET_UNROLL
    for (int b = 0; b < B; ++b) A::store(acc + (m * B + b) * A::kLanes, sums[m][b]);
}

#undef OCTET_UNROLL

template <class A, int M, int B>
void pieces_to(const uint8_t* const* pixels, const Pieces& pieces, const int8_t* w, const Bytes<A>& out, int64_t columns) {
  constexpr int64_t kColumns = B * A::kLanes;
  if constexpr (requires { &A::template bytes_of_pieces<M, B>; }) {
    if (out.by->shrinks && pieces.bytes > 0)
      return A::template bytes_of_pieces<M, B>(pixels, pieces, w, out.by->offset + out.channel,
                                               out.by->multiplier + out.channel, *out.rounding, out.out, out.ld, columns);
  }
  alignas(64) int32_t sums[M * kColumns];
  tile_of_pieces<A, M, B>(pixels, pieces, w, sums);
  out.template put<M, B>(sums, std::min(columns, kColumns));
}

template <class A, int B, int M = A::kRows>
void rows_of_pieces(const uint8_t* const* pixels, const Pieces& pieces, int64_t m, const int8_t* w, Bytes<A> out,
                    int64_t columns) {
  for (; m >= M; m -= M, pixels += M, out = out.at(M, 0)) pieces_to<A, M, B>(pixels, pieces, w, out, columns);
  if constexpr (M > 1) {
    if (m) rows_of_pieces<A, B, M - 1>(pixels, pieces, m, w, out, columns);
  }
}

template <class A, int B = A::kBlocks>
void group_of_pieces(int blocks, const uint8_t* const* pixels, const Pieces& pieces, int64_t m, const int8_t* w,
                     const Bytes<A>& out, int64_t columns) {
  if (blocks == B) return rows_of_pieces<A, B>(pixels, pieces, m, w, out, columns);
  if constexpr (B > 1) group_of_pieces<A, B - 1>(blocks, pixels, pieces, m, w, out, columns);
}

template <class A>
int64_t depth_of(const Pieces& pieces) {
  return pieces.count * ceil_div(pieces.bytes, A::kStep) * A::kStep;
}

template <class A>
void run_pieces_u8(const uint8_t* const* pixels, const Pieces& pieces, int64_t m, const int8_t* packed, int64_t n,
                   const Requantize& by, uint8_t* out, int64_t ldout) {
  static_assert(A::kStep == kPieceStep && sizeof(typename A::X) == 1);
  const typename A::Rounding rounding(by);
  const Bytes<A> all{&by, &rounding, out, ldout};
  const int64_t k = depth_of<A>(pieces);
  for (int64_t n0 = 0; n0 < n; n0 += kGroup<A>)
    group_of_pieces<A>(blocks_of<A>(n, n0), pixels, pieces, m, packed + n0 * k, all.at(0, n0), n - n0);
}

template <class A>
constexpr NativeGemm table_with_pieces(const char* route) {
  NativeGemm made = table<A>(route);
  made.run_pieces_u8 = &run_pieces_u8<A>;
  return made;
}

}  // namespace octet::tile

// A tile of the GEMM that leaves its registers as bytes (equation 7), on AVX-512. Where K is small, as in the expanding layers
// of MobileNets, bringing the sums back from the L1 cache cost as much as the products.
//
// g++ keeps two of each accumulator, one of them in memory, unless the file that includes this says
// #pragma GCC optimize("no-tree-coalesce-vars") at its top.
#pragma once

#include <immintrin.h>

#include "core/cpu/unroll.h"
#include "core/rows/rounding.h"

#define OCTET_INLINE __attribute__((always_inline))

namespace octet::tile {
namespace {

// The 16 * B sums of a row to bytes, where no product leaves int32 and offsets are in the sums.
template <int B>
inline OCTET_INLINE __m512i row_to_bytes(const __m512i* sums, const float* multiplier, const Rounding512& rounding) {
  const auto pair = [&](auto b) OCTET_INLINE {
    const __m512i first = rounding.small(sums[b], multiplier + 16 * b);
    if constexpr (b + 1 < B)
      return _mm512_packs_epi32(first, rounding.small(sums[b + 1], multiplier + 16 * (b + 1)));
    else
      return _mm512_packs_epi32(first, first);
  };
  const __m512i first = pair(constant<0>);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  if constexpr (B > 2)
    return _mm512_permutexvar_epi32(order, rounding.bytes(first, pair(constant<2>)));
  else
    return _mm512_permutexvar_epi32(order, rounding.bytes(first, first));
}

// The first `columns` bytes.
template <int B>
inline OCTET_INLINE void store_bytes(uint8_t* out, __m512i q, int64_t columns) {
  if (columns < 16 * B) return _mm512_mask_storeu_epi8(out, (1ull << columns) - 1, q);
  if constexpr (B == 4) _mm512_storeu_si512(out, q);
  if constexpr (B == 3) _mm512_mask_storeu_epi8(out, (1ull << 48) - 1, q);
  if constexpr (B == 2) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(q));
  if constexpr (B == 1) _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(q));
}

// As tile::tile, for steps >= 1 and multipliers that shrink.
template <class A, int M, int B>
void bytes512(const uint8_t* x, int64_t ldx, const int8_t* w, int64_t steps, const int32_t* offset,
              const float* multiplier, const Rounding512& given, uint8_t* out, int64_t ldout, int64_t columns,
              const int8_t* ahead) {
  constexpr int kSets = M * B * 2 <= A::kAccSets ? 2 : 1, kTile = M * B;
  __m512i sums[kSets * kTile];
  each<B>([&](auto b) OCTET_INLINE {
    const __m512i start = _mm512_loadu_si512(offset + 16 * b);
    each<M>([&](auto m) OCTET_INLINE {
      sums[m * B + b] = start;
      if constexpr (kSets == 2) sums[kTile + m * B + b] = A::zero();
    });
  });
  const auto step = [&](int64_t s, auto set) OCTET_INLINE {
    __m512i weights[B];
    each<B>([&](auto b) OCTET_INLINE { weights[b] = A::load(w + (s * B + b) * 64); });
    each<M>([&](auto m) OCTET_INLINE {
      const __m512i four = A::broadcast(x + m * ldx + s * A::kStep);
      each<B>([&](auto b) OCTET_INLINE {
        __m512i& sum = sums[set * kTile + m * B + b];
        sum = A::dot(sum, four, weights[b]);
      });
    });
  };
  int64_t s = 0;
  const auto advance = [&]() OCTET_INLINE {
    each<kSets>([&](auto set) OCTET_INLINE {
      if constexpr (M > 1) __builtin_prefetch(ahead + (s + set) * 64, 0, 2);
      step(s + set, set);
    });
    s += kSets;
  };
  // Of a loop that may not run at all g++ copies every sum in every step, so that they lie in one place behind it.
  if constexpr (kSets == 1)
    do advance();
    while (s < steps);
  else
    while (s + kSets <= steps) advance();
  if constexpr (kSets == 2) {
    if (s < steps) step(s, constant<0>);
    each<kTile>([&](auto i) OCTET_INLINE { sums[i] = A::add(sums[i], sums[kTile + i]); });
  }
  // A copy, because for all the compiler knows a byte that is written may be one of these.
  const Rounding512 rounding = given;
  each<M>([&](auto m) OCTET_INLINE {
    store_bytes<B>(out + m * ldout, row_to_bytes<B>(sums + m * B, multiplier, rounding), columns);
  });
}

// The same over rows in pieces (tile_pieces.h), each of at least one step.
template <class A, int M, int B>
void bytes512_of_pieces(const uint8_t* const* pixels, const Pieces& pieces, const int8_t* w, const int32_t* offset,
                        const float* multiplier, const Rounding512& given, uint8_t* out, int64_t ldout, int64_t columns) {
  __m512i sums[M * B];
  each<B>([&](auto b) OCTET_INLINE {
    const __m512i start = _mm512_loadu_si512(offset + 16 * b);
    each<M>([&](auto m) OCTET_INLINE { sums[m * B + b] = start; });
  });
  int64_t piece = 0;
  do {
    const uint8_t* x[M];
    each<M>([&](auto m) OCTET_INLINE { x[m] = pixels[m] + pieces.starts[piece]; });
    int64_t at = 0;
    do {
      __m512i weights[B];
      each<B>([&](auto b) OCTET_INLINE { weights[b] = A::load(w + b * 64); });
      each<M>([&](auto m) OCTET_INLINE {
        const __m512i four = A::broadcast(x[m] + at);
        each<B>([&](auto b) OCTET_INLINE { sums[m * B + b] = A::dot(sums[m * B + b], four, weights[b]); });
      });
      at += A::kStep, w += B * 64;
    } while (at < pieces.bytes);
  } while (++piece < pieces.count);
  const Rounding512 rounding = given;
  each<M>([&](auto m) OCTET_INLINE {
    store_bytes<B>(out + m * ldout, row_to_bytes<B>(sums + m * B, multiplier, rounding), columns);
  });
}

}  // namespace
}  // namespace octet::tile

#undef OCTET_INLINE

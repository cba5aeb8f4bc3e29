// The tiles' vectors on AVX-512: an `Arch` of tile.h, less its products, of which there are several.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "core/rows/rounding.h"

namespace octet {
namespace {

struct Avx512 {
  using X = uint8_t;
  using Acc = __m512i;
  using Weight = __m512i;
  using Activation = __m512i;
  static constexpr int kLanes = 16, kStep = 4, kBlocks = 4, kRows = 6, kAccSets = 16;
  static Acc zero() { return _mm512_setzero_si512(); }
  static Acc add(Acc a, Acc b) { return _mm512_add_epi32(a, b); }
  static void store(int32_t* out, Acc a) { _mm512_storeu_si512(out, a); }
  using Rounding = Rounding512;
  template <int Blocks>
  static void requantize(const int32_t* sums, const int32_t* offset, const float* multiplier, const Rounding& rounding,
                         uint8_t* out) {
    requantize512<Blocks>(sums, offset, multiplier, rounding, out);
  }
  using Adding = AddingToSums512;
  template <int Blocks>
  static void requantize_and_add(const int32_t* sums, const int32_t* offset, const float* multiplier, const Adding& adding,
                                 const uint8_t* other, int64_t columns, uint8_t* out) {
    if (Blocks == 4 && columns >= 64)
      return _mm512_storeu_si512(out, requantize_and_add512<Blocks>(sums, offset, multiplier, adding, other));
    const __mmask64 mask = columns < 64 ? (1ull << columns) - 1 : ~0ull;
    alignas(64) uint8_t beside[64];
    _mm512_store_si512(beside, _mm512_maskz_loadu_epi8(mask, other));
    _mm512_mask_storeu_epi8(out, mask, requantize_and_add512<Blocks>(sums, offset, multiplier, adding, beside));
  }
  static Weight load(const int8_t* w) { return _mm512_loadu_si512(w); }
  static Activation broadcast(const X* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
  }
};

}  // namespace
}  // namespace octet

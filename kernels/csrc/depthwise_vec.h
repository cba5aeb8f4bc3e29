// Vectors of 16 and 32 channels for depthwise.h, less the products: those differ with the instruction set.
#pragma once

#include <immintrin.h>

#include "depthwise.h"
#include "rounding.h"

namespace octet::depthwise {
namespace {

struct Vec16 {
  using Acc = __m128i;
  using Rounding = Rounding128;
  static constexpr int kWidth = 16;
  static Acc zero() { return _mm_setzero_si128(); }
  static Acc load(const uint8_t* x) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x)); }
  static Acc low8(Acc a, Acc b) { return _mm_unpacklo_epi8(a, b); }
  static Acc high8(Acc a, Acc b) { return _mm_unpackhi_epi8(a, b); }
  static Acc low16(Acc a, Acc b) { return _mm_unpacklo_epi16(a, b); }
  static Acc high16(Acc a, Acc b) { return _mm_unpackhi_epi16(a, b); }
  static Acc weights(const int8_t* w) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(w)); }
  static void finish(const Acc (&sums)[4], const int32_t* offset, const float* multiplier,
                     const Rounding& rounding, uint8_t* out) {
    const auto q = [&](int b) { return rounding.whole(sums[b], offset + 4 * b, multiplier + 4 * b); };
    const Acc first = _mm_packs_epi32(q(0), q(1)), second = _mm_packs_epi32(q(2), q(3));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), rounding.bytes(first, second));
  }
};

struct Vec32 {
  using Acc = __m256i;
  using Rounding = Rounding256;
  static constexpr int kWidth = 32;
  static Acc zero() { return _mm256_setzero_si256(); }
  static Acc load(const uint8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
  static Acc low8(Acc a, Acc b) { return _mm256_unpacklo_epi8(a, b); }
  static Acc high8(Acc a, Acc b) { return _mm256_unpackhi_epi8(a, b); }
  static Acc low16(Acc a, Acc b) { return _mm256_unpacklo_epi16(a, b); }
  static Acc high16(Acc a, Acc b) { return _mm256_unpackhi_epi16(a, b); }
  static Acc weights(const int8_t* w) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)); }
  static void finish(const Acc (&sums)[4], const int32_t* offset, const float* multiplier,
                     const Rounding& rounding, uint8_t* out) {
    const auto q = [&](int b) { return rounding.whole(sums[b], offset + 8 * b, multiplier + 8 * b); };
    const Acc first = _mm256_packs_epi32(q(0), q(1)), second = _mm256_packs_epi32(q(2), q(3));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), rounding.bytes(first, second));
  }
};

// Four products at once, exact: the bytes of a lane are the taps.
template <class Vec>
struct Vnni : Vec {
  using Acc = typename Vec::Acc;
  static constexpr int kDotBytes = Vec::kWidth;
  static Acc dots(Acc lanes) { return lanes; }
  static void pack_weight(const int8_t (&taps)[4], int lane, int8_t* packed) {
    for (int i = 0; i < 4; ++i) packed[lane * 4 + i] = taps[i];
  }
};

}  // namespace
}  // namespace octet::depthwise

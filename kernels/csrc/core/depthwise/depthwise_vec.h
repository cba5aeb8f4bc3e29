// Vectors of 32 bytes for depthwise_loop.h, less the products: those differ with the instruction set.
#pragma once

#include <immintrin.h>

#include "core/depthwise/depthwise_loop.h"
#include "core/rows/rounding.h"

namespace octet::depthwise {
namespace {

struct Vec32 {
  using Acc = __m256i;
  using Rounding = Rounding256;
  static constexpr int kWidth = 32, kHeldWeights = 0;
  static Acc load(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
  template <int Parts>
  static Acc gather(const uint8_t* x, int64_t step) {
    static_assert(Parts == 2);
    const auto part = [&](int64_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i * step)); };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(part(0)), part(1), 1);
  }
  static Acc constant(const int32_t* lanes) { return load(lanes); }
  static Acc low8(Acc a, Acc b) { return _mm256_unpacklo_epi8(a, b); }
  static Acc high8(Acc a, Acc b) { return _mm256_unpackhi_epi8(a, b); }
  static Acc low16(Acc a, Acc b) { return _mm256_unpacklo_epi16(a, b); }
  static Acc high16(Acc a, Acc b) { return _mm256_unpackhi_epi16(a, b); }
  static Acc finish(const Acc (&sums)[4], const float* multiplier, const Rounding& rounding) {
    const auto q = [&](int b) { return rounding.small(sums[b], multiplier + 8 * b); };
    const Acc first = _mm256_packs_epi32(q(0), q(1)), second = _mm256_packs_epi32(q(2), q(3));
    return rounding.bytes(first, second);
  }
  static void store(uint8_t* out, Acc bytes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes); }
};

// Four products at once, exact: the bytes of a lane are the taps.
template <class Vec>
struct Vnni : Vec {
  using Acc = typename Vec::Acc;
  using Weight = Acc;
  static constexpr int kDotBytes = Vec::kWidth;
  static Acc dots(Acc lanes) { return lanes; }
  static Weight weight(const int8_t* w) { return Vec::load(w); }
  static void pack_weight(const int8_t (&taps)[4], int lane, int8_t* packed) {
    for (int i = 0; i < 4; ++i) packed[lane * 4 + i] = taps[i];
  }
};

}  // namespace
}  // namespace octet::depthwise

// Products of narrow weights by AVX-512 VNNI, for narrow_loop.h.
#pragma once

#include <immintrin.h>

#include "core/gemm/narrow_loop.h"

namespace octet {
namespace {

struct Avx512VnniNarrow {
  static constexpr int kBytes = 64, kPanels = 4, kAhead = 0, kSets = 2, kRows = 6, kManyRows = 0, kWidePanels = 1;
  using V = NarrowVectors<kBytes>;
  using Partial = V::Ints;
  static Partial begin(V::Ints sums) { return sums; }
  static V::Ints end(V::Ints, Partial partial) { return partial; }
  static void dot(Partial& partial, V::Bytes u, V::Bytes x) {
    partial = (V::Ints)_mm512_dpbusd_epi32((__m512i)partial, (__m512i)u, (__m512i)x);
  }
  static V::Floats reals(const uint16_t* halves) {
    return (V::Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
  }
  static V::Ints widened(const uint8_t* from) {
    return (V::Ints)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
};

}  // namespace
}  // namespace octet

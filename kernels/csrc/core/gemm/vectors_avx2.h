// The tiles' vectors on AVX2: an `Arch` of tile.h, less its products, of which there are several.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "core/rows/rounding.h"

namespace octet {
namespace {

struct Avx2 {
  using Acc = __m256i;
  using Weight = __m256i;
  using Activation = __m256i;
  static constexpr int kLanes = 8, kBlocks = 2;
  static Acc zero() { return _mm256_setzero_si256(); }
  static Acc add(Acc a, Acc b) { return _mm256_add_epi32(a, b); }
  static void store(int32_t* out, Acc a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), a); }
  using Rounding = Rounding256;
  template <int Blocks>
  static void requantize(const int32_t* sums, const int32_t* offset, const float* multiplier, const Rounding& rounding,
                         uint8_t* out) {
    requantize256<Blocks>(sums, offset, multiplier, rounding, out);
  }
  static __m256i broadcast4(const void* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
  }
};

}  // namespace
}  // namespace octet

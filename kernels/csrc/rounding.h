// Equation 7 on vectors: sums to whole numbers that fit a byte. `low` and `high` are bounds before the output's zero point
// is added, where all still is float: a clamp between whole numbers and a rounding to whole numbers commute.
#pragma once

#include <immintrin.h>

#include "native.h"

namespace octet {
namespace {

struct Rounding128 {
  __m128 low, high;
  __m128i zero_point;
  explicit Rounding128(const Requantize& by)
      : low(_mm_set1_ps(by.low())), high(_mm_set1_ps(by.high())), zero_point(_mm_set1_epi32(by.zero_point)) {}
  __m128i operator()(__m128i sum, const int32_t* offset, const float* multiplier) const {
    const __m128i exact = _mm_add_epi32(sum, _mm_loadu_si128(reinterpret_cast<const __m128i*>(offset)));
    const __m128 real = _mm_mul_ps(_mm_cvtepi32_ps(exact), _mm_loadu_ps(multiplier));
    return _mm_add_epi32(_mm_cvtps_epi32(_mm_min_ps(_mm_max_ps(real, low), high)), zero_point);
  }
};

struct Rounding256 {
  __m256 low, high;
  __m256i zero_point;
  explicit Rounding256(const Requantize& by)
      : low(_mm256_set1_ps(by.low())), high(_mm256_set1_ps(by.high())), zero_point(_mm256_set1_epi32(by.zero_point)) {}
  __m256i operator()(__m256i sum, const int32_t* offset, const float* multiplier) const {
    const __m256i exact = _mm256_add_epi32(sum, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(offset)));
    const __m256 real = _mm256_mul_ps(_mm256_cvtepi32_ps(exact), _mm256_loadu_ps(multiplier));
    return _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(real, low), high)), zero_point);
  }
};

// `Blocks` vectors of 8 sums to bytes.
template <int Blocks>
inline void requantize256(const int32_t* sums, const int32_t* offset, const float* multiplier,
                          const Rounding256& rounding, uint8_t* out) {
  const auto whole = [&](int b) {
    const __m256i sum = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums + 8 * b));
    return rounding(sum, offset + 8 * b, multiplier + 8 * b);
  };
  for (int b = 0; b < Blocks; ++b) {
    const __m256i q = whole(b);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 8 * b), _mm_packus_epi16(words, words));
  }
}

#if defined(__AVX512BW__)
struct Rounding512 {
  __m512 low, high;
  __m512i zero_point;
  explicit Rounding512(const Requantize& by)
      : low(_mm512_set1_ps(by.low())), high(_mm512_set1_ps(by.high())), zero_point(_mm512_set1_epi32(by.zero_point)) {}
  __m512i operator()(__m512i sum, const int32_t* offset, const float* multiplier) const {
    const __m512i exact = _mm512_add_epi32(sum, _mm512_loadu_si512(offset));
    const __m512 real = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_loadu_ps(multiplier));
    return _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(real, low), high)), zero_point);
  }
};

// `Blocks` vectors of 16 sums to bytes.
template <int Blocks>
inline void requantize512(const int32_t* sums, const int32_t* offset, const float* multiplier,
                          const Rounding512& rounding, uint8_t* out) {
  const auto whole = [&](int b) {
    return rounding(_mm512_load_si512(sums + 16 * b), offset + 16 * b, multiplier + 16 * b);
  };
  if constexpr (Blocks == 4) {
    // Packing works within 128 bits, which leaves groups of four bytes in the order that the permutation undoes.
    const __m512i first = _mm512_packs_epi32(whole(0), whole(1)), second = _mm512_packs_epi32(whole(2), whole(3));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(first, second)));
  } else {
    for (int b = 0; b < Blocks; ++b)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * b), _mm512_cvtepi32_epi8(whole(b)));
  }
}
#endif

}  // namespace
}  // namespace octet

// Equation 7 on vectors, in as few steps as keep every bit. Packing saturates, so the clamps are the packs' own and those
// of the bytes: the zero point is added as int16, to 16 and more values at once. Only what the conversion to int32 would wrap
// must be held before it, and from below it does not matter, as what wraps there is the least integer anyway. Where the zero
// point is 0 and every byte is allowed, as behind a ReLU6, packing is all: a tenth of a depthwise convolution's time less.
#pragma once

#include <immintrin.h>

#include "core/rows/requantize.h"

namespace octet {
namespace {

constexpr float kMostWord = 32767.0f;  // and any zero point on top saturates

inline bool packing_is_all(const Requantize& by) { return by.zero_point == 0 && by.bottom == 0 && by.top == 255; }

struct Rounding256 {
  __m256 most = _mm256_set1_ps(kMostWord);
  __m256i zero_point, bottom, top;
  bool plain;
  explicit Rounding256(const Requantize& by)
      : zero_point(_mm256_set1_epi16(static_cast<int16_t>(by.zero_point))),
        bottom(_mm256_set1_epi8(static_cast<int8_t>(by.bottom))),
        top(_mm256_set1_epi8(static_cast<int8_t>(by.top))),
        plain(packing_is_all(by)) {}
  // Eight sums to whole numbers, the zero point not yet added.
  __m256i whole(__m256i sum, const int32_t* offset, const float* multiplier) const {
    const __m256i exact = _mm256_add_epi32(sum, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(offset)));
    const __m256 real = _mm256_mul_ps(_mm256_cvtepi32_ps(exact), _mm256_loadu_ps(multiplier));
    return _mm256_cvtps_epi32(_mm256_min_ps(real, most));
  }
  // The same where offsets are in the sums, and no product leaves int32.
  __m256i small(__m256i sum, const float* multiplier) const {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(multiplier)));
  }
  // Two packs of sixteen to bytes.
  __m256i bytes(__m256i first, __m256i second) const {
    if (plain) return _mm256_packus_epi16(first, second);
    const __m256i q = _mm256_packus_epi16(_mm256_adds_epi16(first, zero_point), _mm256_adds_epi16(second, zero_point));
    return _mm256_min_epu8(_mm256_max_epu8(q, bottom), top);
  }
};

// One or two vectors of 8 sums to bytes. Packing works within 128 bits, which leaves groups of four bytes in the order that
// the permutation undoes.
template <int Blocks>
inline void requantize256(const int32_t* sums, const int32_t* offset, const float* multiplier,
                          const Rounding256& rounding, uint8_t* out) {
  static_assert(Blocks <= 2);
  const auto whole = [&](int b) {
    const __m256i sum = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums + 8 * b));
    return rounding.whole(sum, offset + 8 * b, multiplier + 8 * b);
  };
  const __m256i first = whole(0), words = _mm256_packs_epi32(first, Blocks == 2 ? whole(1) : first);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m128i q = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(rounding.bytes(words, words), order));
  if constexpr (Blocks == 2)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), q);
  else
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), q);
}

#if defined(__AVX512BW__)
struct Rounding512 {
  __m512 most = _mm512_set1_ps(kMostWord);
  __m512i zero_point, bottom, top;
  bool plain;
  explicit Rounding512(const Requantize& by)
      : zero_point(_mm512_set1_epi16(static_cast<int16_t>(by.zero_point))),
        bottom(_mm512_set1_epi8(static_cast<int8_t>(by.bottom))),
        top(_mm512_set1_epi8(static_cast<int8_t>(by.top))),
        plain(packing_is_all(by)) {}
  __m512i whole(__m512i sum, const int32_t* offset, const float* multiplier) const {
    const __m512i exact = _mm512_add_epi32(sum, _mm512_loadu_si512(offset));
    const __m512 real = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_loadu_ps(multiplier));
    return _mm512_cvtps_epi32(_mm512_min_ps(real, most));
  }
  // The same where offsets are in the sums, and no product leaves int32.
  __m512i small(__m512i sum, const float* multiplier) const {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_loadu_ps(multiplier)));
  }
  __m512i bytes(__m512i first, __m512i second) const {
    if (plain) return _mm512_packus_epi16(first, second);
    const __m512i q = _mm512_packus_epi16(_mm512_adds_epi16(first, zero_point), _mm512_adds_epi16(second, zero_point));
    return _mm512_min_epu8(_mm512_max_epu8(q, bottom), top);
  }
};

// An addition that fits int32, of `a` and `b`.
struct Adding512 {
  __m512i a_zero, b_zero;
  __m512 a_multiplier, b_multiplier;
  Rounding512 rounding;
  explicit Adding512(const AddSettings& s)
      : a_zero(_mm512_set1_epi32(s.a_zero)),
        b_zero(_mm512_set1_epi32(s.b_zero)),
        a_multiplier(_mm512_set1_ps(s.a_multiplier)),
        b_multiplier(_mm512_set1_ps(s.b_multiplier)),
        rounding({nullptr, nullptr, s.zero_point, s.bottom, s.top}) {}
  static __m512 real(const uint8_t* q, __m512i zero, __m512 multiplier) {
    const __m512i whole = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(whole, zero)), multiplier);
  }
  __m512i whole(const uint8_t* a, const uint8_t* b) const {
    return _mm512_cvtps_epi32(_mm512_add_ps(real(a, a_zero, a_multiplier), real(b, b_zero, b_multiplier)));
  }
};

// The bytes of four packed vectors, in the order of these.
inline __m512i in_order512(__m512i packed) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed);
}

// 64 bytes of a sum.
inline __m512i add512(const Adding512& adding, const uint8_t* a, const uint8_t* b) {
  const __m512i first = _mm512_packs_epi32(adding.whole(a, b), adding.whole(a + 16, b + 16));
  const __m512i second = _mm512_packs_epi32(adding.whole(a + 32, b + 32), adding.whole(a + 48, b + 48));
  return in_order512(adding.rounding.bytes(first, second));
}

// The bytes of a layer, which never become bytes: clamped and rounded as reals, with something added as `b` of an addition that
// fits int32. To make bytes and read them again takes eight instructions to a vector, this four. Bounds are whole numbers, so
// clamping may come first; what is then below 2^22 is rounded by adding 1.5 * 2^23, where floats are whole numbers.
struct AddingToSums512 {
  static constexpr float kWhole = 12582912.0f;
  __m512 bottom, top, back;
  Adding512 adding;
  AddingToSums512(const Requantize& by, const AddSettings& s)
      : bottom(_mm512_set1_ps(static_cast<float>(by.bottom - by.zero_point))),
        top(_mm512_set1_ps(static_cast<float>(by.top - by.zero_point))),
        back(_mm512_set1_ps(kWhole - static_cast<float>(by.zero_point - s.a_zero))),
        adding(s) {}
  __m512i whole(const int32_t* sums, const int32_t* offset, const float* multiplier, const uint8_t* other) const {
    const __m512i exact = _mm512_add_epi32(_mm512_load_si512(sums), _mm512_loadu_si512(offset));
    const __m512 real = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_loadu_ps(multiplier));
    const __m512 clamped = _mm512_max_ps(_mm512_min_ps(real, top), bottom);
    const __m512 own = _mm512_sub_ps(_mm512_add_ps(clamped, _mm512_set1_ps(kWhole)), back);
    const __m512 beside = Adding512::real(other, adding.b_zero, adding.b_multiplier);
    return _mm512_cvtps_epi32(_mm512_add_ps(_mm512_mul_ps(own, adding.a_multiplier), beside));
  }
};

// Up to four vectors of 16 sums; behind those are bytes that mean nothing.
template <int Blocks>
inline __m512i requantize_and_add512(const int32_t* sums, const int32_t* offset, const float* multiplier,
                                     const AddingToSums512& adding, const uint8_t* other) {
  static_assert(Blocks <= 4);
  const auto whole = [&](int b) { return adding.whole(sums + 16 * b, offset + 16 * b, multiplier + 16 * b, other + 16 * b); };
  const auto pair = [&](int b) {
    const __m512i first = whole(b);
    return _mm512_packs_epi32(first, b + 1 < Blocks ? whole(b + 1) : first);
  };
  const __m512i first = pair(0);
  return in_order512(adding.adding.rounding.bytes(first, Blocks > 2 ? pair(2) : first));
}

// Up to four vectors of 16 sums to bytes.
template <int Blocks>
inline void requantize512(const int32_t* sums, const int32_t* offset, const float* multiplier,
                          const Rounding512& rounding, uint8_t* out) {
  static_assert(Blocks <= 4);
  const auto whole = [&](int b) {
    return rounding.whole(_mm512_load_si512(sums + 16 * b), offset + 16 * b, multiplier + 16 * b);
  };
  const auto pair = [&](int b) {
    const __m512i first = whole(b);
    return _mm512_packs_epi32(first, b + 1 < Blocks ? whole(b + 1) : first);
  };
  const __m512i first = pair(0), second = Blocks > 2 ? pair(2) : first;
  const __m512i q = in_order512(rounding.bytes(first, second));
  if constexpr (Blocks == 4) {
    _mm512_storeu_si512(out, q);
    return;
  }
  if constexpr (Blocks >= 2) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(q));
  if constexpr (Blocks != 2)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * (Blocks - 1)), _mm512_extracti32x4_epi32(q, Blocks - 1));
}
#endif

}  // namespace
}  // namespace octet

// AVX2 without VNNI, two routes. Pairwise: vpmaddubsw, whose int16 pairs saturate unless the weights prove they cannot.
// Wide: both operands as int16 in vpmaddwd, exact for every weight and activation, at half the products per instruction.
#include <immintrin.h>

#include "tile.h"

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
  static void requantize(const int32_t* sums, const int32_t* offset, const float* multiplier, const Requantize& by,
                         uint8_t* out) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums));
    const __m256i exact = _mm256_add_epi32(raw, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(offset)));
    __m256 real = _mm256_mul_ps(_mm256_cvtepi32_ps(exact), _mm256_loadu_ps(multiplier));
    real = _mm256_min_ps(_mm256_max_ps(real, _mm256_set1_ps(by.low())), _mm256_set1_ps(by.high()));
    const __m256i q = _mm256_add_epi32(_mm256_cvtps_epi32(real), _mm256_set1_epi32(by.zero_point));
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
  }
  static __m256i broadcast4(const void* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
  }
};

struct Pairwise : Avx2 {
  using X = uint8_t;
  static constexpr int kStep = 4, kRows = 4, kAccSets = 8;
  static Weight load(const int8_t* w) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)); }
  static Activation broadcast(const X* x) { return broadcast4(x); }
  static Acc dot(Acc a, Activation x, Weight w) {
    return _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1)));
  }
};

struct Wide : Avx2 {
  using X = uint16_t;
  static constexpr int kStep = 2, kRows = 4, kAccSets = 8;
  static Weight load(const int8_t* w) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  }
  static Activation broadcast(const X* x) { return broadcast4(x); }
  static Acc dot(Acc a, Activation x, Weight w) { return _mm256_add_epi32(a, _mm256_madd_epi16(x, w)); }
};

}  // namespace

extern const NativeGemm kAvx2PairwiseGemm = tile::table<Pairwise>("pairwise");
extern const NativeGemm kAvx2WideGemm = tile::table<Wide>("wide");

}  // namespace octet

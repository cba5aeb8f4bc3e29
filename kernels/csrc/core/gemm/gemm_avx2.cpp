// AVX2 without VNNI, three routes, all by products of at most four instructions for 32 of them. Pairwise: vpmaddubsw, whose int16
// pairs saturate unless the weights prove they cannot. Signed: |x - 128| in vpmaddubsw by the weight with the sign of x - 128,
// whose pairs are at most 2 * 128 * 127 and fit, for every weight but -128, which has no opposite. Wide: both operands as int16
// in vpmaddwd, for every weight, which it has to widen, and reads half as fast.
#include "core/gemm/native_gemm.h"
#include "core/gemm/tile_pieces.h"
#include "core/gemm/vectors_avx2.h"

namespace octet {
namespace {

struct Pairwise : Avx2 {
  using X = uint8_t;
  static constexpr int kStep = 4, kRows = 4, kAccSets = 8, kGroupsAtOnce = 4;
  static Weight load(const int8_t* w) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)); }
  static Activation broadcast(const X* x) { return broadcast4(x); }
  static Acc dot(Acc a, Activation x, Weight w) {
    return _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1)));
  }
};

struct Signed : Avx2 {
  using X = uint16_t;
  // Four bytes of each, to a step.
  struct Activation {
    __m256i magnitude, value;
  };
  static constexpr int kStep = 4, kRows = 5, kAccSets = 8, kHead = sizeof(int32_t), kGroupsAtOnce = 4;
  static void spread(const uint8_t* x, int64_t k, X* to) {
    const __m128i top = _mm_set1_epi8(-128);
    int64_t i = 0;
    for (; i + 16 <= k; i += 16) {
      const __m128i value = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i)), top);
      const __m128i magnitude = _mm_abs_epi8(value);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_unpacklo_epi32(magnitude, value));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i + 8), _mm_unpackhi_epi32(magnitude, value));
    }
    for (; i < k; i += kStep) {
      int32_t four;
      std::memcpy(&four, x + i, sizeof four);
      const __m128i value = _mm_xor_si128(_mm_cvtsi32_si128(four), top);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to + i), _mm_unpacklo_epi32(_mm_abs_epi8(value), value));
    }
  }
  static Weight load(const int8_t* w) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)); }
  static Activation broadcast(const X* x) { return {broadcast4(x), broadcast4(x + 2)}; }
  static Acc dot(Acc a, Activation x, Weight w) {
    const __m256i pairs = _mm256_maddubs_epi16(x.magnitude, _mm256_sign_epi8(w, x.value));
    return _mm256_add_epi32(a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
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

extern const NativeGemm kAvx2PairwiseGemm = tile::table_with_pieces<Pairwise>("pairwise");
extern const NativeGemm kAvx2SignedGemm = tile::table<Signed>("signed");
extern const NativeGemm kAvx2Gemm = tile::table<Wide>("wide");

}  // namespace octet

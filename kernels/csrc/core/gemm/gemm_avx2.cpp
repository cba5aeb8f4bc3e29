// AVX2 without VNNI, two routes. Pairwise: vpmaddubsw, whose int16 pairs saturate unless the weights prove they cannot.
// Wide: both operands as int16 in vpmaddwd, exact for every weight and activation, at half the products per instruction.
#include "core/gemm/native_gemm.h"
#include "core/gemm/tile_pieces.h"
#include "core/gemm/vectors_avx2.h"

namespace octet {
namespace {

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

extern const NativeGemm kAvx2PairwiseGemm = tile::table_with_pieces<Pairwise>("pairwise");
extern const NativeGemm kAvx2Gemm = tile::table<Wide>("wide");

}  // namespace octet

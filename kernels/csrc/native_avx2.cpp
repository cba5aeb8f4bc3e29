// AVX2 without VNNI, two routes. Pairwise: vpmaddubsw, whose int16 pairs saturate unless the weights prove they cannot.
// Wide: both operands as int16 in vpmaddwd, exact for every weight and activation, at half the products per instruction.
#include <immintrin.h>

#include "rounding.h"
#include "tile_pieces.h"
#include "winograd.h"

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

// Pairs of int16, the weights too.
struct Pairs : Avx2 {
  using X = uint8_t;
  static constexpr int kStep = 4, kRows = 4, kAccSets = 8;
  static Weight load(const int8_t* w) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)); }
  static Activation broadcast(const X* x) { return broadcast4(x); }
  static Acc dot(Acc a, Activation x, Weight w) { return _mm256_add_epi32(a, _mm256_madd_epi16(x, w)); }
};

struct Winograd {
  using Gemm = Pairs;
  static constexpr int kBytes = 32;
};

}  // namespace

extern const NativeGemm kAvx2PairwiseGemm = tile::table_with_pieces<Pairwise>("pairwise");
extern const NativeGemm kAvx2WideGemm = tile::table<Wide>("wide");
extern const NativeWinograd kAvx2Winograd = winograd::table<Winograd>();

}  // namespace octet

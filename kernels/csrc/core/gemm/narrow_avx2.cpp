// Products of narrow weights by AVX2: vpmaddubsw cannot saturate on integers of 4 bits.
#include <immintrin.h>

#include "core/gemm/narrow_loop.h"

namespace octet {
namespace {

struct Avx2Narrow {
  static constexpr int kBytes = 32, kPanels = 4, kAhead = 4096, kSets = 1, kRows = 4, kWidePanels = 1, kManyRows = 12;
  using V = NarrowVectors<kBytes>;
  using Partial = __m256i;
  static Partial begin(V::Ints) { return _mm256_setzero_si256(); }
  static V::Ints end(V::Ints sums, Partial pairs) {
    return sums + (V::Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  static void dot(Partial& pairs, V::Bytes u, V::Bytes x) {
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)u, (__m256i)x));
  }
  static V::Ints widened(const uint16_t* from) {
    return (V::Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static V::Ints widened(const uint8_t* from) {
    return (V::Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
};

}  // namespace

extern const NativeNarrow kAvx2Narrow = narrow_table<Avx2Narrow>("unpacked, pairwise");

}  // namespace octet

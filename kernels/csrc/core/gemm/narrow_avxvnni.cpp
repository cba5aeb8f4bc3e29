// Products of narrow weights by AVX-VNNI.
#include <immintrin.h>

#include "core/gemm/narrow_loop.h"

namespace octet {
namespace {

struct AvxVnniNarrow {
  static constexpr int kBytes = 32, kPanels = 2, kAhead = 0, kSets = 2, kRows = 4, kWidePanels = 1, kManyRows = 12;
  using V = NarrowVectors<kBytes>;
  using Partial = V::Ints;
  static Partial begin(V::Ints sums) { return sums; }
  static V::Ints end(V::Ints, Partial partial) { return partial; }
  static void dot(Partial& partial, V::Bytes u, V::Bytes x) {
    partial = (V::Ints)_mm256_dpbusd_avx_epi32((__m256i)partial, (__m256i)u, (__m256i)x);
  }
  static V::Ints widened(const uint16_t* from) {
    return (V::Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static V::Ints widened(const uint8_t* from) {
    return (V::Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
};

}  // namespace

extern const NativeNarrow kAvxVnniNarrow = narrow_table<AvxVnniNarrow>("unpacked, vnni");

}  // namespace octet

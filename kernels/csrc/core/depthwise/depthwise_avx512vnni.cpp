// Depthwise convolution on AVX-512 VNNI.
#include "core/depthwise/depthwise_vec.h"

namespace octet {
namespace depthwise {
namespace {

struct Vec64 {
  using Acc = __m512i;
  using Rounding = Rounding512;
  static constexpr int kWidth = 64, kHeldWeights = 12;
  static Acc load(const void* x) { return _mm512_loadu_si512(x); }
  template <int Parts>
  static Acc gather(const uint8_t* x, int64_t step) {
    const auto half = [&](int64_t i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i * step)); };
    const auto quarter = [&](int64_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i * step)); };
    if constexpr (Parts == 2) return _mm512_inserti64x4(_mm512_castsi256_si512(half(0)), half(1), 1);
    Acc whole = _mm512_inserti32x4(_mm512_castsi128_si512(quarter(0)), quarter(1), 1);
    whole = _mm512_inserti32x4(whole, quarter(2), 2);
    return _mm512_inserti32x4(whole, quarter(3), 3);
  }
  static Acc constant(const int32_t* lanes) { return load(lanes); }
  static Acc low8(Acc a, Acc b) { return _mm512_unpacklo_epi8(a, b); }
  static Acc high8(Acc a, Acc b) { return _mm512_unpackhi_epi8(a, b); }
  static Acc low16(Acc a, Acc b) { return _mm512_unpacklo_epi16(a, b); }
  static Acc high16(Acc a, Acc b) { return _mm512_unpackhi_epi16(a, b); }
  static Acc finish(const Acc (&sums)[4], const float* multiplier, const Rounding& rounding) {
    const auto q = [&](int b) { return rounding.small(sums[b], multiplier + 16 * b); };
    const Acc first = _mm512_packs_epi32(q(0), q(1)), second = _mm512_packs_epi32(q(2), q(3));
    return rounding.bytes(first, second);
  }
  // The first `valid` bytes of part P.
  template <int Parts, int P>
  static void store_part(uint8_t* out, Acc bytes, int64_t valid) {
    const uint64_t mask = valid == kWidth ? ~0ull : (1ull << valid) - 1;
    if constexpr (Parts == 1) _mm512_mask_storeu_epi8(out, mask, bytes);
    if constexpr (Parts == 2) _mm256_mask_storeu_epi8(out, static_cast<__mmask32>(mask), _mm512_extracti64x4_epi64(bytes, P));
    if constexpr (Parts == 4) _mm_mask_storeu_epi8(out, static_cast<__mmask16>(mask), _mm512_extracti32x4_epi32(bytes, P));
  }
};

struct Dots : Vnni<Vec64> {
  static Acc dot(Acc sum, Acc x, Weight w) { return _mm512_dpbusd_epi32(sum, x, w); }
};

}  // namespace
}  // namespace depthwise

extern const NativeDepthwise kAvx512VnniDepthwise = depthwise::table<depthwise::Dots>();

}  // namespace octet

// Depthwise convolution on AVX-512 VNNI, with narrower vectors for the last channels.
#include "depthwise_vec.h"

namespace octet {
namespace depthwise {
namespace {

struct Vec64 {
  using Acc = __m512i;
  using Rounding = Rounding512;
  static constexpr int kWidth = 64;
  static Acc zero() { return _mm512_setzero_si512(); }
  static Acc load(const uint8_t* x) { return _mm512_loadu_si512(x); }
  static Acc low8(Acc a, Acc b) { return _mm512_unpacklo_epi8(a, b); }
  static Acc high8(Acc a, Acc b) { return _mm512_unpackhi_epi8(a, b); }
  static Acc low16(Acc a, Acc b) { return _mm512_unpacklo_epi16(a, b); }
  static Acc high16(Acc a, Acc b) { return _mm512_unpackhi_epi16(a, b); }
  static Acc weights(const int8_t* w) { return _mm512_loadu_si512(w); }
  static void finish(const Acc (&sums)[4], const int32_t* offset, const float* multiplier,
                     const Rounding& rounding, uint8_t* out) {
    const auto q = [&](int b) { return rounding.whole(sums[b], offset + 16 * b, multiplier + 16 * b); };
    const Acc first = _mm512_packs_epi32(q(0), q(1)), second = _mm512_packs_epi32(q(2), q(3));
    _mm512_storeu_si512(out, rounding.bytes(first, second));
  }
};

struct Narrow : Vnni<Vec16> {
  static Acc dot(Acc sum, Acc x, const int8_t* w) { return _mm_dpbusd_epi32(sum, x, weights(w)); }
};

struct Middle : Vnni<Vec32> {
  static Acc dot(Acc sum, Acc x, const int8_t* w) { return _mm256_dpbusd_epi32(sum, x, weights(w)); }
};

struct Wide : Vnni<Vec64> {
  static Acc dot(Acc sum, Acc x, const int8_t* w) { return _mm512_dpbusd_epi32(sum, x, weights(w)); }
};

}  // namespace
}  // namespace depthwise

extern const NativeDepthwise kAvx512VnniDepthwise =
    depthwise::table<4, depthwise::Wide, depthwise::Middle, depthwise::Narrow>();

}  // namespace octet

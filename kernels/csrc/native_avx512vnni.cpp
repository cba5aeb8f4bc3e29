// AVX-512 VNNI: vpdpbusd adds four u8 * s8 products to an int32 without an int16 in between, so it is always exact.
#include <immintrin.h>

#include "tile.h"

namespace octet {
namespace {

struct Avx512Vnni {
  using X = uint8_t;
  using Acc = __m512i;
  using Weight = __m512i;
  using Activation = __m512i;
  static constexpr int kLanes = 16, kStep = 4, kBlocks = 4, kRows = 6, kAccSets = 16;
  static Acc zero() { return _mm512_setzero_si512(); }
  static Acc add(Acc a, Acc b) { return _mm512_add_epi32(a, b); }
  static void store(int32_t* out, Acc a) { _mm512_storeu_si512(out, a); }
  static void requantize(const int32_t* sums, const int32_t* offset, const float* multiplier, const Requantize& by,
                         uint8_t* out) {
    __m512 real = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_loadu_si512(sums), _mm512_loadu_si512(offset)));
    real = _mm512_mul_ps(real, _mm512_loadu_ps(multiplier));
    real = _mm512_min_ps(_mm512_max_ps(real, _mm512_set1_ps(by.low())), _mm512_set1_ps(by.high()));
    const __m512i q = _mm512_add_epi32(_mm512_cvtps_epi32(real), _mm512_set1_epi32(by.zero_point));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(q));
  }
  static Weight load(const int8_t* w) { return _mm512_loadu_si512(w); }
  static Activation broadcast(const X* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
  }
  static Acc dot(Acc a, Activation x, Weight w) { return _mm512_dpbusd_epi32(a, x, w); }
};

}  // namespace

extern const NativeGemm kAvx512VnniGemm = tile::table<Avx512Vnni>("vnni");

}  // namespace octet

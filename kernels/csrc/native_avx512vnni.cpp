// AVX-512 VNNI: vpdpbusd adds four u8 * s8 products to an int32 without an int16 in between, so it is always exact.
#if !defined(__clang__)
#pragma GCC optimize("no-tree-coalesce-vars")  // tile_avx512.h
#endif
#include <immintrin.h>

#include "rounding.h"
#include "tile_avx512.h"
#include "tile_pieces.h"
#include "winograd.h"

namespace octet {
namespace {

struct Avx512 {
  using X = uint8_t;
  using Acc = __m512i;
  using Weight = __m512i;
  using Activation = __m512i;
  static constexpr int kLanes = 16, kStep = 4, kBlocks = 4, kRows = 6, kAccSets = 16;
  static Acc zero() { return _mm512_setzero_si512(); }
  static Acc add(Acc a, Acc b) { return _mm512_add_epi32(a, b); }
  static void store(int32_t* out, Acc a) { _mm512_storeu_si512(out, a); }
  using Rounding = Rounding512;
  template <int Blocks>
  static void requantize(const int32_t* sums, const int32_t* offset, const float* multiplier, const Rounding& rounding,
                         uint8_t* out) {
    requantize512<Blocks>(sums, offset, multiplier, rounding, out);
  }
  static Weight load(const int8_t* w) { return _mm512_loadu_si512(w); }
  static Activation broadcast(const X* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
  }
};

struct Avx512Vnni : Avx512 {
  static Acc dot(Acc a, Activation x, Weight w) { return _mm512_dpbusd_epi32(a, x, w); }
  template <int M, int B>
  static void bytes(const X* x, int64_t ldx, const int8_t* w, int64_t steps, const int32_t* offset,
                    const float* multiplier, const Rounding& rounding, uint8_t* out, int64_t ldout, int64_t columns,
                    const int8_t* ahead) {
    tile::bytes512<Avx512Vnni, M, B>(x, ldx, w, steps, offset, multiplier, rounding, out, ldout, columns, ahead);
  }
  template <int M, int B>
  static void bytes_of_pieces(const uint8_t* const* pixels, const Pieces& pieces, const int8_t* w, const int32_t* offset,
                              const float* multiplier, const Rounding& rounding, uint8_t* out, int64_t ldout,
                              int64_t columns) {
    tile::bytes512_of_pieces<Avx512Vnni, M, B>(pixels, pieces, w, offset, multiplier, rounding, out, ldout, columns);
  }
};

// Pairs of int16 in the place of four bytes.
struct Pairs : Avx512 {
  static Acc dot(Acc a, Activation x, Weight w) { return _mm512_dpwssd_epi32(a, x, w); }
};

struct Winograd {
  using Gemm = Pairs;
  static constexpr int kBytes = 64;
};

}  // namespace

extern const NativeGemm kAvx512VnniGemm = tile::table_with_pieces<Avx512Vnni>("vnni");
extern const NativeWinograd kAvx512VnniWinograd = winograd::table<Winograd>();

}  // namespace octet

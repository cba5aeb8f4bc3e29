// The `Arch` of tile.h and tile_pieces.h for AVX-512 VNNI: vpdpbusd adds four u8 * s8 products to an int32 without an int16 in
// between, so it is always exact.
#pragma once

#include "core/gemm/tile_avx512.h"
#include "core/gemm/tile_pieces.h"
#include "core/gemm/vectors_avx512vnni.h"

namespace octet {
namespace {

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

}  // namespace
}  // namespace octet

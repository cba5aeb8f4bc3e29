// Winograd's algorithm on AVX-512 VNNI.
#if !defined(__clang__)
#pragma GCC optimize("no-tree-coalesce-vars")  // core/gemm/tile_avx512.h
#endif
#include "core/conv/native_winograd.h"
#include "core/conv/winograd_loop.h"
#include "core/gemm/vectors_avx512vnni.h"

namespace octet {
namespace {

// Pairs of int16 in the place of four bytes.
struct Pairs : Avx512 {
  static Acc dot(Acc a, Activation x, Weight w) { return _mm512_dpwssd_epi32(a, x, w); }
};

struct Winograd {
  using Gemm = Pairs;
  static constexpr int kBytes = 64;
};

}  // namespace

extern const NativeWinograd kAvx512VnniWinograd = winograd::table<Winograd>();

}  // namespace octet

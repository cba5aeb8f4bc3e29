// Winograd's algorithm on AVX-VNNI.
#include "core/conv/native_winograd.h"
#include "core/conv/winograd_loop.h"
#include "core/gemm/vectors_avxvnni.h"

namespace octet {
namespace {

// Pairs of int16 in the place of four bytes.
struct Pairs : AvxVnni {
  static Acc dot(Acc a, Activation x, Weight w) { return _mm256_dpwssd_avx_epi32(a, x, w); }
};

struct Winograd {
  using Gemm = Pairs;
  static constexpr int kBytes = 32;
};

}  // namespace

extern const NativeWinograd kAvxVnniWinograd = winograd::table<Winograd>();

}  // namespace octet

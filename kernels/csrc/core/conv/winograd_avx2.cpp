// Winograd's algorithm on AVX2.
#include "core/conv/native_winograd.h"
#include "core/conv/winograd_loop.h"
#include "core/gemm/vectors_avx2.h"

namespace octet {
namespace {

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

extern const NativeWinograd kAvx2Winograd = winograd::table<Winograd>();

}  // namespace octet

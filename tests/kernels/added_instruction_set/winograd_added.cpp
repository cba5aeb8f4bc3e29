// Winograd's algorithm on the added instruction set.
#include "core/conv/native_winograd.h"
#include "core/conv/winograd_loop.h"
#include "core/gemm/vectors_avx2.h"
#include "counted.h"

namespace octet {
namespace {

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

extern const NativeWinograd kAddedWinograd = added::counted(winograd::table<Winograd>(), &NativeWinograd::run, "winograd");

}  // namespace octet

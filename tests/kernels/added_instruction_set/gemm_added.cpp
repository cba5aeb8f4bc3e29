// Products of the added instruction set: those of AVX2 for every weight, under another name.
#include "core/gemm/native_gemm.h"
#include "core/gemm/tile.h"
#include "core/gemm/vectors_avx2.h"
#include "counted.h"

namespace octet {
namespace {

struct Added : Avx2 {
  using X = uint16_t;
  static constexpr int kStep = 2, kRows = 4, kAccSets = 8;
  static Weight load(const int8_t* w) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  }
  static Activation broadcast(const X* x) { return broadcast4(x); }
  static Acc dot(Acc a, Activation x, Weight w) { return _mm256_add_epi32(a, _mm256_madd_epi16(x, w)); }
};

}  // namespace

extern const NativeGemm kAddedGemm = added::counted(tile::table<Added>("added"), &NativeGemm::run_u8, "gemm");

}  // namespace octet

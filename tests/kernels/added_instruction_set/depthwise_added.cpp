// Depthwise convolutions of the added instruction set.
#include "core/depthwise/depthwise_vec.h"
#include "counted.h"

namespace octet {
namespace depthwise {
namespace {

struct Pairs : Vec32 {
  struct Two {
    Acc even, odd;
  };
  using Weight = Two;
  static constexpr int kDotBytes = 2 * kWidth;
  static Two dots(Acc lanes) { return {_mm256_and_si256(lanes, _mm256_set1_epi16(255)), _mm256_srli_epi16(lanes, 8)}; }
  static Weight weight(const int8_t* w) { return {load(w), load(w + kWidth)}; }
  static Acc dot(Acc sum, Two x, Weight w) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x.even, w.even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x.odd, w.odd));
  }
  static void pack_weight(const int8_t (&taps)[4], int lane, int8_t* packed) {
    const int16_t even[2] = {taps[0], taps[2]}, odd[2] = {taps[1], taps[3]};
    std::memcpy(packed + lane * 4, even, sizeof even);
    std::memcpy(packed + kWidth + lane * 4, odd, sizeof odd);
  }
};

}  // namespace
}  // namespace depthwise

extern const NativeDepthwise kAddedDepthwise =
    added::counted(depthwise::table<depthwise::Pairs>(), &NativeDepthwise::row, "depthwise");

}  // namespace octet

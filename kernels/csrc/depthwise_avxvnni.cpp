// Depthwise convolution on AVX-VNNI.
#include "depthwise_vec.h"

namespace octet {
namespace depthwise {
namespace {

struct Narrow : Vnni<Vec16> {
  static Acc dot(Acc sum, Acc x, const int8_t* w) { return _mm_dpbusd_avx_epi32(sum, x, weights(w)); }
};

struct Wide : Vnni<Vec32> {
  static Acc dot(Acc sum, Acc x, const int8_t* w) { return _mm256_dpbusd_avx_epi32(sum, x, weights(w)); }
};

}  // namespace
}  // namespace depthwise

extern const NativeDepthwise kAvxVnniDepthwise = depthwise::table<2, depthwise::Wide, depthwise::Narrow>();

}  // namespace octet

// Depthwise convolution on AVX-VNNI.
#include "core/depthwise/depthwise_vec.h"

namespace octet {
namespace depthwise {
namespace {

struct Dots : Vnni<Vec32> {
  static Acc dot(Acc sum, Acc x, Weight w) { return _mm256_dpbusd_avx_epi32(sum, x, w); }
};

}  // namespace
}  // namespace depthwise

extern const NativeDepthwise kAvxVnniDepthwise = depthwise::table<depthwise::Dots>();

}  // namespace octet

// Products of narrow weights by NEON's dot product, of bytes of [0, 15] as signed ones.
#include <arm_neon.h>

#include "core/gemm/narrow_loop.h"

namespace octet {
namespace {

struct NeonDotNarrow {
  static constexpr int kBytes = 16, kPanels = 2, kAhead = 0, kSets = 1, kRows = 4, kWidePanels = 1, kManyRows = 12;
  using V = NarrowVectors<kBytes>;
  using Partial = V::Ints;
  static Partial begin(V::Ints sums) { return sums; }
  static V::Ints end(V::Ints, Partial partial) { return partial; }
  static void dot(Partial& partial, V::Bytes u, V::Bytes x) {
    partial = (V::Ints)vdotq_s32((int32x4_t)partial, (int8x16_t)u, (int8x16_t)x);
  }
  template <class Number>
  static V::Ints widened(const Number* from) {
    return V::Ints{from[0], from[1], from[2], from[3]};
  }
};

}  // namespace

extern const NativeNarrow kNeonDotNarrow = narrow_table<NeonDotNarrow>("unpacked, dot");

}  // namespace octet

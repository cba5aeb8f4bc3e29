// Products of narrow weights in plain C++, for narrow_loop.h.
#pragma once

#include "core/gemm/narrow_loop.h"

namespace octet {
namespace {

struct PortableNarrow {
  static constexpr int kBytes = 16, kPanels = 2, kAhead = 0, kSets = 1, kRows = 2, kWidePanels = 1, kManyRows = 5;
  using V = NarrowVectors<kBytes>;
  using Partial = V::Ints;
  static Partial begin(V::Ints sums) { return sums; }
  static V::Ints end(V::Ints, Partial partial) { return partial; }
  // Not inline: unrolled, it would be half a megabyte.
  [[gnu::noinline]] static Partial plus(Partial partial, V::Bytes u, V::Bytes x) {
    // Each of the four bytes of a lane, x with its sign.
    for (int i = 0; i < 4; ++i) partial += ((V::Ints)u >> 8 * i & 255) * ((V::Ints)x << (24 - 8 * i) >> 24);
    return partial;
  }
  static void dot(Partial& partial, V::Bytes u, V::Bytes x) { partial = plus(partial, u, x); }
  template <class Number>
  static V::Ints widened(const Number* from) {
    return V::Ints{from[0], from[1], from[2], from[3]};
  }
};

}  // namespace
}  // namespace octet

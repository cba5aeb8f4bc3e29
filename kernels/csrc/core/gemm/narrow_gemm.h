// Weights of 4, 3 and 2 bits, multiplied from the bytes that are stored (kernels/narrow.py).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/gemm/packed_gemm.h"
#include "core/rows/rows.h"

namespace octet {

// The tensors of a narrow weight. They are the caller's, and outlive what is made of them, which reads `bytes` in each call.
struct NarrowSource {
  const uint8_t* bytes;
  int64_t n, k;
  int bits;                      // 4, 3 or 2
  int64_t groups = 0;            // scales of an output; 0 where it has one, which the layer applies to exact sums
  const void* scales = nullptr;  // (n, groups), or (n, groups, 2) with zero points
  bool half_scales = false;      // float16; else float32
  bool zero_points = false;
};

// Of a weight with scales by group, whose products are reals; it has no sums, and a layer of it no scale.
class GroupedGemm : public PackedGemm {
 public:
  using PackedGemm::PackedGemm;
  // y[m * ldy + j] = equation 11 without the row's scale and the bias. x as in PackedGemm::run; zero_points (m,) of its rows.
  virtual void run_reals(const uint8_t* x, int64_t ldx, int64_t m, const int32_t* zero_points, float* y, int64_t ldy,
                         int thread, int threads, bool backwards) const = 0;
};

// The products of a layer by group, or null where `scale` brings its sums to reals (or is empty). A program without narrow weights is
// compiled without them: OCTET_WITHOUT_NARROW.
inline const GroupedGemm* groups_of(const PackedGemm& gemm, const float* scale) {
#ifdef OCTET_WITHOUT_NARROW
  return (void)gemm, (void)scale, nullptr;
#else
  return scale ? nullptr : dynamic_cast<const GroupedGemm*>(&gemm);
#endif
}

// A GroupedGemm where the source has groups.
std::unique_ptr<PackedGemm> pack_narrow(const NarrowSource& source);

// A product that is real already, as the operands of a kernel that brings a sum to reals: one sum of 1, whose scale it is.
class RealsAsSums {
 public:
  // The sums of `n` outputs.
  const int32_t* sums(int64_t n) {
    int32_t* const out = ones_.get(std::max(n, filled_));
    if (n > filled_) {  // what was there is gone where it grew
      std::fill_n(out, n, 1);
      filled_ = n;
    }
    return out;
  }
  // And their channels; `reals` of one row.
  Channels channels(int64_t n, const float* reals, const float* bias) { return {n, zeros_.get(n), reals, bias}; }

 private:
  Scratch<int32_t> ones_, zeros_;  // the latter as they are made
  int64_t filled_ = 0;
};

}  // namespace octet

// Our own GEMM kernels, one table per instruction set. No torch header is included here or below.
#pragma once

#include <cstdint>

namespace octet {

// A weight is packed in groups of outputs; a group is the unit of work that threads share.
struct NativeGemm {
  const char* route;
  int64_t (*groups)(int64_t n);
  int64_t (*packed_bytes)(int64_t n, int64_t k);
  void (*pack)(const int8_t* weight, int64_t n, int64_t k, int8_t* packed);
  // Sums of groups [first, last) for rows [0, m); x, ldx and acc as in PackedGemm::run.
  void (*run)(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k, int32_t* acc,
              int64_t ldacc, int64_t first, int64_t last);
};

extern const NativeGemm kPortableGemm;
#if defined(__x86_64__)
extern const NativeGemm kAvx2PairwiseGemm;  // only for weights that pass pairs_fit_int16
extern const NativeGemm kAvx2WideGemm;
extern const NativeGemm kAvxVnniGemm;
extern const NativeGemm kAvx512VnniGemm;
#endif

}  // namespace octet

// Plain loops for CPUs that no other table serves: exact, and as fast as the compiler makes it.
#include <algorithm>

#include "core/gemm/native_gemm.h"

namespace octet {
namespace {

constexpr int64_t kGroup = 16;

int64_t packed_bytes(int64_t n, int64_t k) { return n * k; }
void pack(const int8_t* weight, int64_t n, int64_t k, int8_t* packed) { std::copy(weight, weight + n * k, packed); }

void run(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k, int32_t* acc,
         int64_t ldacc, int64_t first, int64_t last, bool) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = first * kGroup; j < std::min(n, last * kGroup); ++j) {
      int32_t sum = 0;
      for (int64_t c = 0; c < k; ++c) sum += static_cast<int32_t>(x[i * ldx + c]) * packed[j * k + c];
      acc[i * ldacc + j] = sum;
    }
}

}  // namespace

extern const NativeGemm kPortableGemm = {"portable", kGroup, &packed_bytes, &pack, &run,
                                         nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};  // bytes and reals come from these sums

}  // namespace octet

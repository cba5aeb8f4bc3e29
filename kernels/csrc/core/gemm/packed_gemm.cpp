#include "core/gemm/packed_gemm.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace octet {

void check_products(int64_t k) {
  if (k > kMaxK)
    throw std::invalid_argument("K is " + std::to_string(k) + "; the sums of more than " + std::to_string(kMaxK) +
                                " products may overflow int32");
}

PackedGemm::PackedGemm(const int8_t* weight, int64_t n, int64_t k) : n_(n), k_(k), row_sums_(n) {
  check_products(k);
  for (int64_t j = 0; j < n; ++j) {
    int32_t sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += weight[j * k + i];
    row_sums_[j] = sum;
  }
}

bool pairs_fit_int16(const int8_t* weight, int64_t n, int64_t k) {
  constexpr int limit = 32767 / 255;
  for (int64_t j = 0; j < n; ++j) {
    const int8_t* row = weight + j * k;
    for (int64_t i = 0; i < k; i += 2) {
      const int first = row[i], second = i + 1 < k ? row[i + 1] : 0;
      const int positive = std::max(first, 0) + std::max(second, 0);
      const int negative = std::max(-first, 0) + std::max(-second, 0);
      if (std::max(positive, negative) > limit) return false;
    }
  }
  return true;
}

std::vector<int8_t> clamped_part(const int8_t* weight, int64_t size) {
  std::vector<int8_t> part(size);
  for (int64_t i = 0; i < size; ++i) part[i] = std::clamp<int8_t>(weight[i], -64, 64);
  return part;
}

std::vector<int8_t> remaining_part(const int8_t* weight, int64_t size) {
  std::vector<int8_t> part(size);
  for (int64_t i = 0; i < size; ++i) part[i] = static_cast<int8_t>(weight[i] - std::clamp<int8_t>(weight[i], -64, 64));
  return part;
}

}  // namespace octet

#include "core/plan/own_weights.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/plan/views.h"

namespace octet {
// A weight's values, and what has been packed of them.
class OwnWeights::Weight {
 public:
  explicit Weight(const PlanConstant& constant) : sizes_(constant.sizes), values_(static_cast<const int8_t*>(constant.data)) {}

  std::shared_ptr<const PackedGemm> gemm(int64_t group, int64_t groups) {
    const std::lock_guard lock(packing_);
    std::shared_ptr<const PackedGemm>& packed = gemms_[{group, groups}];
    if (!packed) packed = groups ? pack_conv(group, groups) : pack_native(values_, sizes_.at(0), sizes_.at(1));
    return packed;
  }

  std::shared_ptr<const PackedDepthwise> depthwise() {
    const std::lock_guard lock(packing_);
    int64_t kernel[3] = {1, 1, 1};
    for (size_t axis = 2; axis < sizes_.size(); ++axis) kernel[axis + 3 - sizes_.size()] = sizes_[axis];
    if (!depthwise_) depthwise_ = std::make_shared<PackedDepthwise>(values_, sizes_.at(0), kernel);
    return depthwise_;
  }

  std::shared_ptr<const PackedWinograd> winograd() {
    const std::lock_guard lock(packing_);
    if (!winograd_) winograd_ = std::make_shared<PackedWinograd>(values_, sizes_.at(0), sizes_.at(1));
    return winograd_;
  }

 private:
  std::shared_ptr<const PackedGemm> pack_conv(int64_t group, int64_t groups) const {
    const int64_t n = sizes_.at(0) / groups, channels = sizes_.at(1), width = sizes_.back();
    const int64_t rows = product(Sizes(sizes_.begin() + 2, sizes_.end() - 1));
    const int8_t* const first = values_ + group * n * channels * rows * width;
    const int64_t k = rows * packed_kernel_row(width, channels, groups);
    if (k == channels) return pack_native(first, n, k);  // of a 1 x 1 convolution: they lie so already
    return pack_native(kernel_rows(first, n, channels, rows, width, groups).data(), n, k);
  }

  const Sizes sizes_;
  const int8_t* const values_;
  std::mutex packing_;
  std::map<std::pair<int64_t, int64_t>, std::shared_ptr<const PackedGemm>> gemms_;
  std::shared_ptr<const PackedDepthwise> depthwise_;
  std::shared_ptr<const PackedWinograd> winograd_;
};

OwnWeights::OwnWeights(const std::vector<PlanConstant>& constants) {
  for (const PlanConstant& constant : constants) {
    weights_.push_back(constant.dtype == "int8" ? std::make_unique<Weight>(constant) : nullptr);
    constants_.push_back(constant.data);
  }
}

OwnWeights::~OwnWeights() = default;

namespace {
[[noreturn]] void refuse_few_bits(int constant) {
  throw std::invalid_argument("$" + std::to_string(constant) + " is a weight of few bits, expected int8 where the core packs it");
}
}  // namespace

// Lowering asks for constants that are int8, and of products for those of few bits, too.
std::shared_ptr<const PackedGemm> OwnWeights::gemm(int constant, int64_t group, int64_t groups) {
  if (!weights_.at(constant)) refuse_few_bits(constant);
  return weights_.at(constant)->gemm(group, groups);
}
std::shared_ptr<const PackedGemm> OwnWeights::grouped(int constant, int) { refuse_few_bits(constant); }
std::shared_ptr<const PackedDepthwise> OwnWeights::depthwise(int constant) { return weights_.at(constant)->depthwise(); }
std::shared_ptr<const PackedWinograd> OwnWeights::winograd(int constant) { return weights_.at(constant)->winograd(); }
std::shared_ptr<const void> OwnWeights::table(int constant) { return {std::shared_ptr<const void>(), constants_.at(constant)}; }

}  // namespace octet

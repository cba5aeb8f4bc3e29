#include "core/plan/own_constant.h"

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "core/plan/views.h"

namespace octet {
namespace {

int64_t bytes_of(const std::string& dtype) {
  if (dtype == "int8" || dtype == "uint8") return 1;
  if (dtype == "int32" || dtype == "float32") return 4;
  throw std::invalid_argument("a constant is " + dtype + ", expected int8, uint8, int32 or float32");
}

// A constant's values, and what has been packed of them.
class OwnWeight {
 public:
  OwnWeight(const void* data, const std::string& dtype, const Sizes& sizes)
      : sizes_(sizes), bytes_(product(sizes) * bytes_of(dtype)) {
    if (!bytes_.empty()) std::memcpy(bytes_.data(), data, bytes_.size());
  }

  const void* data() const { return bytes_.data(); }

  std::shared_ptr<const PackedGemm> gemm(int64_t group, int64_t groups) {
    const std::lock_guard lock(packing_);
    std::shared_ptr<const PackedGemm>& packed = gemms_[{group, groups}];
    if (!packed) packed = groups ? pack_conv(group, groups) : pack_native(values(), sizes_.at(0), sizes_.at(1));
    return packed;
  }

  std::shared_ptr<const PackedDepthwise> depthwise() {
    const std::lock_guard lock(packing_);
    int64_t kernel[3] = {1, 1, 1};
    for (size_t axis = 2; axis < sizes_.size(); ++axis) kernel[axis + 3 - sizes_.size()] = sizes_[axis];
    if (!depthwise_) depthwise_ = std::make_shared<PackedDepthwise>(values(), sizes_.at(0), kernel);
    return depthwise_;
  }

  std::shared_ptr<const PackedWinograd> winograd() {
    const std::lock_guard lock(packing_);
    if (!winograd_) winograd_ = std::make_shared<PackedWinograd>(values(), sizes_.at(0), sizes_.at(1));
    return winograd_;
  }

 private:
  const int8_t* values() const { return reinterpret_cast<const int8_t*>(bytes_.data()); }

  std::shared_ptr<const PackedGemm> pack_conv(int64_t group, int64_t groups) const {
    const int64_t n = sizes_.at(0) / groups, channels = sizes_.at(1), width = sizes_.back();
    const int64_t rows = product(Sizes(sizes_.begin() + 2, sizes_.end() - 1));
    const int8_t* const first = values() + group * n * channels * rows * width;
    const std::vector<int8_t> packed = kernel_rows(first, n, channels, rows, width, groups);
    return pack_native(packed.data(), n, rows * packed_kernel_row(width, channels, groups));
  }

  const Sizes sizes_;
  std::vector<uint8_t> bytes_;
  std::mutex packing_;
  std::map<std::pair<int64_t, int64_t>, std::shared_ptr<const PackedGemm>> gemms_;
  std::shared_ptr<const PackedDepthwise> depthwise_;
  std::shared_ptr<const PackedWinograd> winograd_;
};

}  // namespace

PlanConstant own_constant(const void* data, const std::string& dtype, const std::vector<int64_t>& sizes) {
  const auto own = std::make_shared<OwnWeight>(data, dtype, sizes);
  return {own->data(), dtype, sizes, [own](int64_t group, int64_t groups) { return own->gemm(group, groups); },
          [own] { return own->depthwise(); }, [own] { return own->winograd(); }};
}

}  // namespace octet

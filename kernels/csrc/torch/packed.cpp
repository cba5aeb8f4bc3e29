#include "torch/packed.h"

#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <unordered_map>

#include "core/gemm/narrow_gemm.h"
#include "torch/at_fork.h"
#include "torch/libraries.h"
#include "torch/operands.h"

namespace octet {
namespace {

// Packed forms other than a Library's PackedGemm; only the addresses matter.
const char kDepthwise = 0, kWinograd = 0, kNarrow = 0;

struct PackedKey {
  const c10::StorageImpl* storage;
  const void* data;
  const void* form;  // the Library, or which other form
  int64_t n, k;
  // Two views of one weight may differ in nothing but these: a square matrix and its transpose.
  // Not vectors, whose memory would cost a small layer 0.1 us a call.
  c10::DimVector sizes, strides;
  // Of a narrow weight, whose scales by group are packed too: two views of their memory may differ in size and dtype alone.
  const c10::StorageImpl* scale_storage = nullptr;
  const void* scales = nullptr;
  c10::DimVector scale_sizes = {};
  at::ScalarType scale_type = at::kFloat;
  bool operator==(const PackedKey& other) const {
    return storage == other.storage && data == other.data && form == other.form && n == other.n && k == other.k &&
           sizes == other.sizes && strides == other.strides && scale_storage == other.scale_storage &&
           scales == other.scales && scale_sizes == other.scale_sizes && scale_type == other.scale_type;
  }
};

struct PackedKeyHash {
  size_t operator()(const PackedKey& key) const { return c10::get_hash(key.data, key.form, key.n, key.k); }
};

// Writes to a tensor, and to its scales.
struct Versions {
  uint32_t weight, scales;
  bool operator==(const Versions&) const = default;
};

struct PackedEntry {
  // A weak reference keeps the StorageImpl's address from being reused, so the key cannot come to mean another storage.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage, scales;  // the latter the weight's again where no scales are packed
  Versions versions;
  std::shared_ptr<const void> packed;  // as the key's form says
  int64_t bytes;                       // of `packed`
};

struct PackedCache {
  ForkedMutex mutex;
  std::unordered_map<PackedKey, PackedEntry, PackedKeyHash> entries;
};

PackedCache& packed_cache() {
  static PackedCache* const instance = new PackedCache;  // never destroyed: threads may outlive static destructors
  return *instance;
}

// Drops the entries of storages that have died; the caller holds the lock.
void forget_dead(PackedCache& known) {
  std::erase_if(known.entries, [](const auto& entry) {
    return entry.second.storage.expired() || entry.second.scales.expired();
  });
}

// Whether a packed weight was made of what lies in a tensor's memory: of all of it, or of a group of a convolution.
bool lies_in(const PackedKey& key, const at::Tensor& weight) {
  if (!weight.has_storage() || key.storage != weight.storage().unsafeGetStorageImpl()) return false;
  const auto* const begin = static_cast<const char*>(weight.const_data_ptr());
  const auto* const at = static_cast<const char*>(key.data);
  return at >= begin && at < begin + weight.nbytes();
}

}  // namespace

namespace {

// The result of `pack()` for n * k weights at `data` in `owner`, computed once for each version of the weights.
template <class Packed, class Pack>
std::shared_ptr<const Packed> find_or_make(const at::Tensor& owner, const void* data, int64_t n, int64_t k,
                                           const void* form, Pack pack, const at::Tensor& scales = {}) {
  const c10::Storage& storage = owner.storage();
  const bool scaled = scales.defined();
  PackedKey key{storage.unsafeGetStorageImpl(), data, form, n, k, c10::DimVector(owner.sizes()), c10::DimVector(owner.strides())};
  if (scaled) {
    key.scale_storage = scales.storage().unsafeGetStorageImpl(), key.scales = scales.const_data_ptr();
    key.scale_sizes = scales.sizes(), key.scale_type = scales.scalar_type();
  }
  const Versions versions{version_of(owner), scaled ? version_of(scales) : 0};
  PackedCache& known = packed_cache();
  {
    std::shared_lock lock(known.mutex);
    const auto found = known.entries.find(key);
    if (found != known.entries.end() && found->second.versions == versions)
      return std::static_pointer_cast<const Packed>(found->second.packed);
  }
  std::shared_ptr<const Packed> made = pack();
  std::unique_lock lock(known.mutex);
  forget_dead(known);
  const c10::Storage& of_scales = scaled ? scales.storage() : storage;
  known.entries.insert_or_assign(key, PackedEntry{storage.getWeakStorageImpl(), of_scales.getWeakStorageImpl(), versions, made, made->bytes()});
  return made;
}

// `rows` returns the weight as int8 (n, k), as a span or a vector.
template <class Rows>
std::shared_ptr<const PackedGemm> find_or_pack(const at::Tensor& owner, const void* data, int64_t n, int64_t k,
                                               c10::string_view backend, Rows rows) {
  const Library& lib = library(backend);
  return find_or_make<PackedGemm>(owner, data, n, k, &lib, [&] {
    const auto weight = rows();
    return pack_by(lib, std::data(weight), n, k);
  });
}

// The bytes of a narrow weight; without scales.
NarrowSource narrow_source(const at::Tensor& weight) {
  TORCH_CHECK_VALUE(weight.dim() == 3 && weight.is_contiguous() && weight.size(1) >= 2 && weight.size(1) <= 4 &&
                        weight.size(2) > 0 && weight.size(2) % 4 == 0,
                    "q_weight must be contiguous uint8 of shape (N, 2 to 4 bits, K / 8) with K a multiple of 32, got ",
                    weight.sizes());
  return {weight.const_data_ptr<uint8_t>(), weight.size(0), weight.size(2) * 8, static_cast<int>(weight.size(1))};
}

// `scales` are those by group, and undefined where the source has none.
std::shared_ptr<const PackedGemm> find_or_pack_narrow(const at::Tensor& weight, const NarrowSource& source,
                                                      const at::Tensor& scales) {
  return find_or_make<PackedGemm>(
      weight, source.bytes, source.n, source.k, &kNarrow,
      [&] { return std::shared_ptr<const PackedGemm>(pack_narrow(source)); }, scales);
}

}  // namespace

// Such a weight has no bytes, and its packed form, the sums of its rows, has four a row.
constexpr int64_t kMostEmptyRows = 1 << 24;

std::shared_ptr<const PackedGemm> packed(const at::Tensor& weight, c10::string_view backend) {
  if (weight.scalar_type() == at::kByte) return find_or_pack_narrow(weight, narrow_source(weight), {});
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.scalar_type() == at::kChar && weight.is_contiguous(),
                    "q_weight must be contiguous int8 of shape (N, K), got ", weight.scalar_type(), " ", weight.sizes());
  TORCH_CHECK_VALUE(weight.size(1) > 0 || weight.size(0) <= kMostEmptyRows, "q_weight has ", weight.size(0),
                    " rows without columns, expected at most ", kMostEmptyRows);
  return find_or_pack(weight, weight.const_data_ptr(), weight.size(0), weight.size(1), backend,
                      [&] { return std::span(weight.const_data_ptr<int8_t>(), weight.numel()); });
}

Weight packed_weight(const at::Tensor& weight, const at::Tensor& scale, const char* name, c10::string_view backend) {
  if (weight.scalar_type() != at::kByte || scale.dim() == 1) {
    // Before anything is packed: a weight without columns may say that it has any number of rows.
    const Tensor factors = weight.dim() > 1 ? vector(scale, weight.size(0), name) : scale;
    return {packed(weight, backend), factors};
  }
  NarrowSource source = narrow_source(weight);
  const auto type = scale.scalar_type();
  TORCH_CHECK_TYPE(type == at::kHalf || type == at::kFloat, name, " is ", type, ", expected float16 or float32");
  const bool fits = (scale.dim() == 2 || (scale.dim() == 3 && scale.size(2) == 2)) && scale.size(0) == source.n &&
                    scale.size(1) > 0 && source.k % (scale.size(1) * 32) == 0 && scale.is_contiguous();
  TORCH_CHECK_VALUE(fits, name, " has shape ", scale.sizes(), ", expected (", source.n, ", groups) of 32 inputs or a multiple, ",
                    "with no or 2 values a group, for ", source.k, " inputs");
  source.groups = scale.size(1), source.scales = scale.const_data_ptr();
  source.half_scales = type == at::kHalf, source.zero_points = scale.dim() == 3;
  return {find_or_pack_narrow(weight, source, scale), Tensor()};
}

std::shared_ptr<const PackedGemm> packed_conv(const at::Tensor& weight, int64_t group, int64_t groups,
                                              c10::string_view backend) {
  const at::Tensor part = groups == 1 ? weight : weight.narrow(0, group * (weight.size(0) / groups), weight.size(0) / groups);
  const int64_t n = part.size(0), width = weight.size(-1), channels = weight.size(1);
  const int64_t rows = part.numel() ? part.numel() / (n * width * channels) : 0;
  return find_or_pack(weight, part.const_data_ptr(), n, rows * packed_kernel_row(width, channels, groups), backend, [&] {
    return kernel_rows(part.contiguous().const_data_ptr<int8_t>(), n, channels, rows, width, groups);
  });
}

std::shared_ptr<const PackedDepthwise> packed_depthwise(const at::Tensor& weight) {
  const int64_t channels = weight.size(0), taps = channels ? weight.numel() / channels : 0;
  return find_or_make<PackedDepthwise>(weight, weight.const_data_ptr(), channels, taps, &kDepthwise, [&] {
    int64_t kernel[3] = {1, 1, 1};
    for (int64_t axis = 2; axis < weight.dim(); ++axis) kernel[axis + 3 - weight.dim()] = weight.size(axis);
    return std::make_shared<PackedDepthwise>(weight.contiguous().const_data_ptr<int8_t>(), channels, kernel);
  });
}

std::shared_ptr<const PackedWinograd> packed_winograd(const at::Tensor& weight, c10::string_view backend) {
  if (!library(backend).own) return nullptr;
  const int64_t outputs = weight.size(0), channels = weight.size(1);
  return find_or_make<PackedWinograd>(weight, weight.const_data_ptr(), outputs, channels, &kWinograd, [&] {
    return std::make_shared<PackedWinograd>(weight.contiguous().const_data_ptr<int8_t>(), outputs, channels);
  });
}

int64_t packed_count() {
  PackedCache& known = packed_cache();
  std::unique_lock lock(known.mutex);
  forget_dead(known);
  return static_cast<int64_t>(known.entries.size());
}

int64_t packed_bytes(at::TensorList weights) {
  PackedCache& known = packed_cache();
  std::shared_lock lock(known.mutex);
  int64_t bytes = 0;
  for (const auto& entry : known.entries)  // no structured binding: a lambda of clang 14 takes none
    if (std::any_of(weights.begin(), weights.end(), [&](const at::Tensor& weight) { return lies_in(entry.first, weight); }))
      bytes += entry.second.bytes;
  return bytes;
}

}  // namespace octet

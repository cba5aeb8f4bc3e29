// The operators of embedding tables. FBGEMM's generated kernels serve sums and means on x86-64; the core serves the rest.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <vector>

#include "core/cpu/threads.h"
#include "core/embedding/tables.h"
#include "torch/errors.h"
#include "torch/libraries.h"
#include "torch/operands.h"
#if defined(__x86_64__)
#include <fbgemm/FbgemmEmbedding.h>
#endif

namespace octet {
namespace {

using at::Tensor;

Table table_of(const Tensor& rows, int64_t bits, int64_t dim) {
  const int64_t stride = rows.dim() == 2 ? rows.size(1) : 0;
  const int64_t groups = translated("", [&] { return table_groups(bits, dim, stride); });
  TORCH_CHECK_VALUE(rows.dim() == 2 && groups > 0 && rows.scalar_type() == at::kByte && rows.is_contiguous(),
                    "packed rows are ", rows.scalar_type(), " of shape ", rows.sizes(), ", expected contiguous uint8 (rows, "
                    "bytes) as kernels/tables.py packs ", dim, " values of ", bits, " bits");
  return {rows.const_data_ptr<uint8_t>(), rows.size(0), stride, dim, static_cast<int>(bits), groups};
}

Tensor as_int64(const Tensor& tensor, const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt, name, " are ",
                   tensor.scalar_type(), ", expected int32 or int64");
  return tensor.to(at::kLong).contiguous();
}

Tensor embedding_op(const Tensor& rows, const Tensor& indices, int64_t bits, int64_t dim, c10::string_view) {
  const Table table = table_of(rows, bits, dim);
  const Tensor wanted = as_int64(indices, "indices");
  const int64_t* index = wanted.const_data_ptr<int64_t>();
  translated("", [&] { check_indices(index, wanted.numel(), table.count); });
  std::vector<int64_t> shape(indices.sizes().begin(), indices.sizes().end());
  shape.push_back(dim);
  Tensor out = at::empty(shape, rows.options().dtype(at::kFloat));
  look_up(table, index, wanted.numel(), out.mutable_data_ptr<float>());
  return out;
}

// The weights of a sum, or an undefined tensor.
Tensor checked_weights(const std::optional<Tensor>& weights, const Tensor& indices) {
  if (!weights || !weights->defined()) return {};
  TORCH_CHECK_VALUE(weights->sizes() == indices.sizes(), "per_sample_weights have shape ", weights->sizes(),
                    ", expected that of the indices, ", indices.sizes());
  TORCH_CHECK_TYPE(weights->scalar_type() == at::kFloat, "per_sample_weights are ", weights->scalar_type(),
                   ", expected Float");
  return weights->contiguous();
}

#if defined(__x86_64__)
void fbgemm_bags(const Table& table, const Bags& bags, bool mean, float* out) {
  const bool weighted = bags.weights != nullptr;
  const auto kernel =
      table.bits == 8
          ? fbgemm::GenerateEmbeddingSpMDM<uint8_t, int64_t, int64_t>(table.dim, weighted, mean)
          : fbgemm::GenerateEmbeddingSpMDMNBit<int64_t, int64_t>(table.bits, table.dim, weighted, mean);
  each_range(bags.count, kBagsPerThread, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> ends(bags.ends + begin, bags.ends + end + 1);
    const int64_t first = ends[0], used = ends.back() - first;
    for (int64_t& position : ends) position -= first;
    const bool done = kernel(end - begin, used, table.count, table.rows, bags.indices + first, ends.data(),
                             weighted ? bags.weights + first : nullptr, out + begin * table.dim);
    TORCH_CHECK(done, "FBGEMM's embedding kernel refused its input");
  });
}
#endif

Tensor embedding_bag_op(const Tensor& rows, const Tensor& indices, const Tensor& offsets,
                        const std::optional<Tensor>& weights, int64_t bits, int64_t dim, c10::string_view mode,
                        bool include_last_offset, int64_t padding_idx, c10::string_view backend) {
  TORCH_CHECK_VALUE(mode == "sum" || mode == "mean" || mode == "max", "mode is '", mode, "', expected sum, mean or max");
  TORCH_CHECK_VALUE(mode == "sum" || !weights || !weights->defined(),
                    "per_sample_weights go with mode 'sum', not '", mode, "'");
  const Table table = table_of(rows, bits, dim);
  const Tensor wanted = as_int64(indices, "indices"), begins = as_int64(offsets, "offsets");
  TORCH_CHECK_VALUE(indices.dim() == 1 && offsets.dim() == 1, "indices and offsets must have one dimension, got ",
                    indices.sizes(), " and ", offsets.sizes());
  const Tensor factors = checked_weights(weights, indices);
  std::optional<Bags> bags;
  translated("", [&] {
    bags.emplace(table, wanted.const_data_ptr<int64_t>(), wanted.numel(), begins.const_data_ptr<int64_t>(), begins.numel(),
                 factors.defined() ? factors.const_data_ptr<float>() : nullptr, include_last_offset, padding_idx);
  });
  Tensor out = at::empty({bags->count, dim}, rows.options().dtype(at::kFloat));
  float* values = out.mutable_data_ptr<float>();
#if defined(__x86_64__)
  // FBGEMM has no maximum, no groups and no 3 bits, and its kernels of few bits take whole bytes only. They are 6 to 18 times faster than our own loops, so
  // "native", the default where no one chose, takes them too: it has kernels of its own for products, and none for tables.
  const bool suits = mode != "max" && bits != 3 && table.groups == 1 && dim * bits % 8 == 0 && dim > 0;
  const bool chosen = backend == "fbgemm" || backend == "native" || backend.empty();
  if (suits && chosen && library("fbgemm").why_not().empty()) {
    fbgemm_bags(table, *bags, mode == "mean", values);
    return out;
  }
#endif
  look_up_bags(table, *bags, mode == "max" ? BagMode::kMax : mode == "mean" ? BagMode::kMean : BagMode::kSum, values);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("embedding", &Defined<&embedding_op>::call);
  m.impl("embedding_bag", &Defined<&embedding_bag_op>::call);
}

}  // namespace octet

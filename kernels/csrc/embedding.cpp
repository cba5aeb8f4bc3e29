// Look-ups in embedding tables of 8 and 4 bits per value (kernels/tables.py gives the row format). FBGEMM's generated
// kernels serve sums and means on x86-64; our own loops serve the rest.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu.h"
#include "gemm.h"
#include "packed.h"
#include "rows.h"
#if defined(__x86_64__)
#include <fbgemm/FbgemmEmbedding.h>
#endif

namespace octet {
namespace {

using at::Tensor;

struct Table {
  const uint8_t* rows;
  int64_t count, stride, dim;
  int bits;
  const uint8_t* row(int64_t index) const { return rows + index * stride; }
};

Table table_of(const Tensor& rows, int64_t bits, int64_t dim) {
  TORCH_CHECK_VALUE(bits == 8 || bits == 4, "table bits are ", bits, ", expected 8 or 4");
  const int64_t stride = bits == 8 ? dim + 8 : (dim + 1) / 2 + 4;
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(1) == stride && rows.scalar_type() == at::kByte && rows.is_contiguous(),
                    "packed rows are ", rows.scalar_type(), " of shape ", rows.sizes(), ", expected contiguous uint8 (rows, ",
                    stride, ") for ", dim, " values of ", bits, " bits");
  return {rows.const_data_ptr<uint8_t>(), rows.size(0), stride, dim, static_cast<int>(bits)};
}

Tensor as_int64(const Tensor& tensor, const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt, name, " are ",
                   tensor.scalar_type(), ", expected int32 or int64");
  return tensor.to(at::kLong).contiguous();
}

void check_indices(const int64_t* indices, int64_t n, int64_t count) {
  // Without a branch, so that the compiler takes several at once: the top bit is that of a negative number.
  uint64_t outside = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t index = static_cast<uint64_t>(indices[i]);
    outside |= index | (static_cast<uint64_t>(count) - 1 - index);
  }
  if (outside >> 63 == 0) return;
  for (int64_t i = 0; i < n; ++i)
    TORCH_CHECK_INDEX(indices[i] >= 0 && indices[i] < count, "index ", indices[i], " is outside the table of ", count,
                      " rows");
}

constexpr int64_t kBagsPerThread = 64;

Tensor embedding_op(const Tensor& rows, const Tensor& indices, int64_t bits, int64_t dim, c10::string_view) {
  const Table table = table_of(rows, bits, dim);
  const Tensor wanted = as_int64(indices, "indices");
  const int64_t* index = wanted.const_data_ptr<int64_t>();
  check_indices(index, wanted.numel(), table.count);
  std::vector<int64_t> shape(indices.sizes().begin(), indices.sizes().end());
  shape.push_back(dim);
  Tensor out = at::empty(shape, rows.options().dtype(at::kFloat));
  float* values = out.mutable_data_ptr<float>();
  at::parallel_for(0, wanted.numel(), kBagsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row_kernels().table_row(table.row(index[i]), table.bits, dim, values + i * dim);
  });
  return out;
}

// Indices, where each bag ends, and weights: checked, and without the padding row. They lie in the tensors that were
// given, or in the vectors where these do not hold what is wanted; so a Bags must not be copied.
struct Bags {
  const int64_t *indices, *ends;  // ends: (count + 1,), the first is 0
  const float* weights;           // as long as indices, or null
  int64_t count;
  Tensor given_indices, given_ends, given_weights;
  std::vector<int64_t> own_indices, own_ends;
  std::vector<float> own_weights;
  Bags() = default;
  Bags(const Bags&) = delete;
  Bags& operator=(const Bags&) = delete;
};

void check_ends(const int64_t* ends, int64_t size, int64_t n) {
  TORCH_CHECK_INDEX(size > 0 && ends[0] == 0, "offsets must start at 0, got ",
                    "[", size > 0 ? std::to_string(ends[0]) : "", "]");
  for (int64_t bag = 1; bag < size; ++bag)
    TORCH_CHECK_INDEX(ends[bag] >= ends[bag - 1] && ends[bag] <= n, "offsets must not fall and not exceed the ", n,
                      " indices, got ", ends[bag - 1], " then ", ends[bag]);
}

void leave_out(Bags& bags, int64_t padding_idx) {
  std::vector<int64_t> indices, ends{0};
  std::vector<float> weights;
  for (int64_t bag = 0; bag < bags.count; ++bag) {
    for (int64_t i = bags.ends[bag]; i < bags.ends[bag + 1]; ++i) {
      if (bags.indices[i] == padding_idx) continue;
      indices.push_back(bags.indices[i]);
      if (bags.weights) weights.push_back(bags.weights[i]);
    }
    ends.push_back(static_cast<int64_t>(indices.size()));
  }
  bags.own_indices = std::move(indices);
  bags.own_ends = std::move(ends);
  bags.own_weights = std::move(weights);
  bags.indices = bags.own_indices.data();
  bags.ends = bags.own_ends.data();
  if (bags.weights) bags.weights = bags.own_weights.data();
}

void take_bags(Bags& bags, const Table& table, const Tensor& indices, const Tensor& offsets,
               const std::optional<Tensor>& weights, bool include_last_offset, int64_t padding_idx) {
  bags.given_indices = as_int64(indices, "indices");
  bags.given_ends = as_int64(offsets, "offsets");
  TORCH_CHECK_VALUE(indices.dim() == 1 && offsets.dim() == 1, "indices and offsets must have one dimension, got ",
                    indices.sizes(), " and ", offsets.sizes());
  const int64_t n = indices.numel();
  int64_t size = offsets.numel();
  bags.indices = bags.given_indices.const_data_ptr<int64_t>();
  bags.ends = bags.given_ends.const_data_ptr<int64_t>();
  check_indices(bags.indices, n, table.count);
  if (!include_last_offset) {
    bags.own_ends.assign(bags.ends, bags.ends + size);
    bags.own_ends.push_back(n);
    bags.ends = bags.own_ends.data();
    ++size;
  }
  check_ends(bags.ends, size, n);
  bags.count = size - 1;
  bags.weights = nullptr;
  if (weights && weights->defined()) {
    TORCH_CHECK_VALUE(weights->sizes() == indices.sizes(), "per_sample_weights have shape ", weights->sizes(),
                      ", expected that of the indices, ", indices.sizes());
    TORCH_CHECK_TYPE(weights->scalar_type() == at::kFloat, "per_sample_weights are ", weights->scalar_type(),
                     ", expected Float");
    bags.given_weights = weights->contiguous();
    bags.weights = bags.given_weights.const_data_ptr<float>();
  }
  if (padding_idx >= 0 && std::find(bags.indices, bags.indices + n, padding_idx) != bags.indices + n)
    leave_out(bags, padding_idx);
}

void own_bag(const Table& table, const Bags& bags, int64_t bag, c10::string_view mode, float* row, float* out) {
  const int64_t first = bags.ends[bag], last = bags.ends[bag + 1];
  std::fill_n(out, table.dim, 0.0f);
  for (int64_t i = first; i < last; ++i) {
    row_kernels().table_row(table.row(bags.indices[i]), table.bits, table.dim, row);
    if (mode == "max") {
      for (int64_t d = 0; d < table.dim; ++d) out[d] = i == first || row[d] > out[d] ? row[d] : out[d];
    } else if (!bags.weights) {
      for (int64_t d = 0; d < table.dim; ++d) out[d] += row[d];
    } else {
      for (int64_t d = 0; d < table.dim; ++d) out[d] += row[d] * bags.weights[i];
    }
  }
  if (mode == "mean" && last > first)
    for (int64_t d = 0; d < table.dim; ++d) out[d] /= static_cast<float>(last - first);
}

void own_bags(const Table& table, const Bags& bags, c10::string_view mode, float* out) {
  at::parallel_for(0, bags.count, kBagsPerThread, [&](int64_t begin, int64_t end) {
    std::vector<float> row(table.dim);
    for (int64_t bag = begin; bag < end; ++bag) own_bag(table, bags, bag, mode, row.data(), out + bag * table.dim);
  });
}

#if defined(__x86_64__)
void fbgemm_bags(const Table& table, const Bags& bags, bool mean, float* out) {
  const bool weighted = bags.weights != nullptr;
  const auto kernel =
      table.bits == 8
          ? fbgemm::GenerateEmbeddingSpMDM<uint8_t, int64_t, int64_t>(table.dim, weighted, mean)
          : fbgemm::GenerateEmbeddingSpMDMNBit<int64_t, int64_t>(table.bits, table.dim, weighted, mean);
  at::parallel_for(0, bags.count, kBagsPerThread, [&](int64_t begin, int64_t end) {
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
  Bags bags;
  take_bags(bags, table, indices, offsets, weights, include_last_offset, padding_idx);
  Tensor out = at::empty({bags.count, dim}, rows.options().dtype(at::kFloat));
  float* values = out.mutable_data_ptr<float>();
#if defined(__x86_64__)
  // FBGEMM has no maximum, and its 4-bit kernels take whole bytes only. They are 6 to 18 times faster than our own loops, so
  // "native", the default where no one chose, takes them too: it has kernels of its own for products, and none for tables.
  const bool suits = mode != "max" && (bits == 8 || dim % 2 == 0) && dim > 0;
  const bool wanted = backend == "fbgemm" || backend == "native" || backend.empty();
  if (suits && wanted && why_not_fbgemm().empty()) {
    fbgemm_bags(table, bags, mode == "mean", values);
    return out;
  }
#endif
  own_bags(table, bags, mode, values);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("embedding", &embedding_op);
  m.impl("embedding_bag", &embedding_bag_op);
}

}  // namespace octet

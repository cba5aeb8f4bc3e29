// Look-ups in embedding tables of 8 and 4 bits per value (kernels/tables.py gives the row format). FBGEMM's generated
// kernels serve sums and means on x86-64; our own loops serve the rest.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstring>
#include <limits>
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

struct Bags {
  std::vector<int64_t> indices, ends;  // ends: (bags + 1,)
  std::vector<float> weights;          // as long as indices, or empty
  int64_t count() const { return static_cast<int64_t>(ends.size()) - 1; }
};

// The bags as plain vectors, checked, and without the padding row.
Bags bags_of(const Table& table, const Tensor& indices, const Tensor& offsets, const std::optional<Tensor>& weights,
             bool include_last_offset, int64_t padding_idx) {
  const Tensor wanted = as_int64(indices, "indices"), starts = as_int64(offsets, "offsets");
  TORCH_CHECK_VALUE(wanted.dim() == 1 && starts.dim() == 1, "indices and offsets must have one dimension, got ",
                    indices.sizes(), " and ", offsets.sizes());
  const int64_t n = wanted.numel();
  const int64_t* index = wanted.const_data_ptr<int64_t>();
  check_indices(index, n, table.count);
  std::vector<int64_t> ends(starts.const_data_ptr<int64_t>(), starts.const_data_ptr<int64_t>() + starts.numel());
  if (!include_last_offset) ends.push_back(n);
  TORCH_CHECK_INDEX(!ends.empty() && ends[0] == 0, "offsets must start at 0, got ", starts);
  for (size_t bag = 1; bag < ends.size(); ++bag)
    TORCH_CHECK_INDEX(ends[bag] >= ends[bag - 1] && ends[bag] <= n, "offsets must not fall and not exceed the ", n,
                      " indices, got ", ends[bag - 1], " then ", ends[bag]);
  Tensor factors;
  if (weights && weights->defined()) {
    TORCH_CHECK_VALUE(weights->sizes() == wanted.sizes(), "per_sample_weights have shape ", weights->sizes(),
                      ", expected that of the indices, ", wanted.sizes());
    TORCH_CHECK_TYPE(weights->scalar_type() == at::kFloat, "per_sample_weights are ", weights->scalar_type(),
                     ", expected Float");
    factors = weights->contiguous();
  }
  Bags bags{{}, {0}, {}};
  for (size_t bag = 1; bag < ends.size(); ++bag) {
    for (int64_t i = ends[bag - 1]; i < ends[bag]; ++i) {
      if (index[i] == padding_idx) continue;
      bags.indices.push_back(index[i]);
      if (factors.defined()) bags.weights.push_back(factors.const_data_ptr<float>()[i]);
    }
    bags.ends.push_back(static_cast<int64_t>(bags.indices.size()));
  }
  return bags;
}

void own_bag(const Table& table, const Bags& bags, int64_t bag, c10::string_view mode, float* row, float* out) {
  const int64_t first = bags.ends[bag], last = bags.ends[bag + 1];
  std::fill_n(out, table.dim, 0.0f);
  for (int64_t i = first; i < last; ++i) {
    row_kernels().table_row(table.row(bags.indices[i]), table.bits, table.dim, row);
    if (mode == "max") {
      for (int64_t d = 0; d < table.dim; ++d) out[d] = i == first || row[d] > out[d] ? row[d] : out[d];
    } else if (bags.weights.empty()) {
      for (int64_t d = 0; d < table.dim; ++d) out[d] += row[d];
    } else {
      for (int64_t d = 0; d < table.dim; ++d) out[d] += row[d] * bags.weights[i];
    }
  }
  if (mode == "mean" && last > first)
    for (int64_t d = 0; d < table.dim; ++d) out[d] /= static_cast<float>(last - first);
}

void own_bags(const Table& table, const Bags& bags, c10::string_view mode, float* out) {
  at::parallel_for(0, bags.count(), kBagsPerThread, [&](int64_t begin, int64_t end) {
    std::vector<float> row(table.dim);
    for (int64_t bag = begin; bag < end; ++bag) own_bag(table, bags, bag, mode, row.data(), out + bag * table.dim);
  });
}

#if defined(__x86_64__)
void fbgemm_bags(const Table& table, const Bags& bags, bool mean, float* out) {
  const bool weighted = !bags.weights.empty();
  const auto kernel =
      table.bits == 8
          ? fbgemm::GenerateEmbeddingSpMDM<uint8_t, int64_t, int64_t>(table.dim, weighted, mean)
          : fbgemm::GenerateEmbeddingSpMDMNBit<int64_t, int64_t>(table.bits, table.dim, weighted, mean);
  at::parallel_for(0, bags.count(), kBagsPerThread, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> ends(bags.ends.begin() + begin, bags.ends.begin() + end + 1);
    const int64_t first = ends[0], used = ends.back() - first;
    for (int64_t& position : ends) position -= first;
    const bool done = kernel(end - begin, used, table.count, table.rows, bags.indices.data() + first, ends.data(),
                             weighted ? bags.weights.data() + first : nullptr, out + begin * table.dim);
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
  const Bags bags = bags_of(table, indices, offsets, weights, include_last_offset, padding_idx);
  Tensor out = at::zeros({bags.count(), dim}, rows.options().dtype(at::kFloat));
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

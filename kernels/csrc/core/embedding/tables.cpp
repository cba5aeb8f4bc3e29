#include "core/embedding/tables.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/cpu/threads.h"
#include "core/rows/rows.h"

namespace octet {

int64_t table_stride(int64_t bits, int64_t dim) {
  if (bits != 8 && bits != 4) throw std::invalid_argument("table bits are " + std::to_string(bits) + ", expected 8 or 4");
  return bits == 8 ? dim + 8 : (dim + 1) / 2 + 4;
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
    if (indices[i] < 0 || indices[i] >= count)
      throw std::out_of_range("index " + std::to_string(indices[i]) + " is outside the table of " + std::to_string(count) +
                              " rows");
}

void look_up(const Table& table, const int64_t* indices, int64_t n, float* out) {
  each_range(n, kBagsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      row_kernels().table_row(table.row(indices[i]), table.bits, table.dim, out + i * table.dim);
  });
}

namespace {

void check_ends(const int64_t* ends, int64_t size, int64_t n) {
  if (size == 0 || ends[0] != 0)
    throw std::out_of_range("offsets must start at 0, got [" + (size ? std::to_string(ends[0]) : "") + "]");
  for (int64_t bag = 1; bag < size; ++bag)
    if (ends[bag] < ends[bag - 1] || ends[bag] > n)
      throw std::out_of_range("offsets must not fall and not exceed the " + std::to_string(n) + " indices, got " +
                              std::to_string(ends[bag - 1]) + " then " + std::to_string(ends[bag]));
}

}  // namespace

Bags::Bags(const Table& table, const int64_t* indices, int64_t n, const int64_t* offsets, int64_t size,
           const float* weights, bool include_last_offset, int64_t padding_idx)
    : indices(indices), ends(offsets), weights(weights) {
  check_indices(indices, n, table.count);
  if (!include_last_offset) {
    own_ends_.assign(ends, ends + size);
    own_ends_.push_back(n);
    ends = own_ends_.data();
    ++size;
  }
  check_ends(ends, size, n);
  count = size - 1;
  if (padding_idx >= 0 && std::find(indices, indices + n, padding_idx) != indices + n) leave_out(padding_idx);
}

void Bags::leave_out(int64_t padding_idx) {
  std::vector<int64_t> kept, kept_ends{0};
  std::vector<float> kept_weights;
  for (int64_t bag = 0; bag < count; ++bag) {
    for (int64_t i = ends[bag]; i < ends[bag + 1]; ++i) {
      if (indices[i] == padding_idx) continue;
      kept.push_back(indices[i]);
      if (weights) kept_weights.push_back(weights[i]);
    }
    kept_ends.push_back(static_cast<int64_t>(kept.size()));
  }
  own_indices_ = std::move(kept);
  own_ends_ = std::move(kept_ends);
  own_weights_ = std::move(kept_weights);
  indices = own_indices_.data();
  ends = own_ends_.data();
  if (weights) weights = own_weights_.data();
}

namespace {

void one_bag(const Table& table, const Bags& bags, int64_t bag, BagMode mode, float* row, float* out) {
  const int64_t first = bags.ends[bag], last = bags.ends[bag + 1];
  std::fill_n(out, table.dim, 0.0f);
  for (int64_t i = first; i < last; ++i) {
    row_kernels().table_row(table.row(bags.indices[i]), table.bits, table.dim, row);
    if (mode == BagMode::kMax) {
      for (int64_t d = 0; d < table.dim; ++d) out[d] = i == first || row[d] > out[d] ? row[d] : out[d];
    } else if (!bags.weights) {
      for (int64_t d = 0; d < table.dim; ++d) out[d] += row[d];
    } else {
      for (int64_t d = 0; d < table.dim; ++d) out[d] += row[d] * bags.weights[i];
    }
  }
  if (mode == BagMode::kMean && last > first)
    for (int64_t d = 0; d < table.dim; ++d) out[d] /= static_cast<float>(last - first);
}

}  // namespace

void look_up_bags(const Table& table, const Bags& bags, BagMode mode, float* out) {
  each_range(bags.count, kBagsPerThread, [&](int64_t begin, int64_t end) {
    std::vector<float> row(table.dim);
    for (int64_t bag = begin; bag < end; ++bag) one_bag(table, bags, bag, mode, row.data(), out + bag * table.dim);
  });
}

}  // namespace octet

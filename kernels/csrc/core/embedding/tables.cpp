#include "core/embedding/tables.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/cpu/threads.h"
#include "core/rows/rows.h"

namespace octet {

namespace {

// Of a row: more than memory holds, and their bits are a number still.
constexpr int64_t kMostValues = int64_t{1} << 40;

// Bytes of a row's integers of so many bits, side by side.
int64_t plane(int64_t bits, int64_t dim) { return (dim * bits + 7) / 8; }

float real_of_half(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  // Finite ones (pack_table refuses others): exponent and mantissa in their places, and 112 between the exponents' middles.
  const uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
  const float real = __builtin_bit_cast(float, bits) * 0x1p112f;
  return half & 0x8000 ? -real : real;
}

// A row of fewer than 8 bits.
template <int kBits>
void few_bits(const Table& table, const uint8_t* row, float* out) {
  const uint8_t* const high = row + plane(kBits == 3 ? 2 : kBits, table.dim);
  const uint8_t* tail = high + (kBits == 3 ? plane(1, table.dim) : 0);
  const int64_t group = table.dim / table.groups;
  for (int64_t d = 0; d < table.dim; tail += 4) {
    const float scale = real_of_half(tail), bias = real_of_half(tail + 2);
    for (const int64_t end = d + group; d < end; ++d) {
      int q;
      if constexpr (kBits == 4)
        q = row[d / 2] >> d % 2 * 4 & 15;
      else
        q = row[d / 4] >> d % 4 * 2 & 3;
      if constexpr (kBits == 3) q |= (high[d / 8] >> d % 8 & 1) << 2;
      out[d] = static_cast<float>(q) * scale + bias;
    }
  }
}

void dequantized_row(const Table& table, int64_t index, float* out) {
  const uint8_t* const row = table.row(index);
  if (table.bits == 8 || (table.bits == 4 && table.groups == 1)) return row_kernels().table_row(row, table.bits, table.dim, out);
  return table.bits == 4 ? few_bits<4>(table, row, out) : table.bits == 3 ? few_bits<3>(table, row, out) : few_bits<2>(table, row, out);
}

}  // namespace

int64_t table_groups(int64_t bits, int64_t dim, int64_t stride) {
  if (bits != 8 && (bits < 2 || bits > 4))
    throw std::invalid_argument("table bits are " + std::to_string(bits) + ", expected 8, 4, 3 or 2");
  if (dim < 0 || dim > kMostValues) return 0;
  const int64_t values = bits == 3 ? plane(2, dim) + plane(1, dim) : plane(bits, dim), each = bits == 8 ? 8 : 4;
  const int64_t groups = (stride - values) / each;
  const bool fits = stride == values + groups * each && (groups == 1 || (groups > 1 && bits < 8 && dim > 0 && dim % groups == 0));
  return fits ? groups : 0;
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
      dequantized_row(table, indices[i], out + i * table.dim);
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
    dequantized_row(table, bags.indices[i], row);
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

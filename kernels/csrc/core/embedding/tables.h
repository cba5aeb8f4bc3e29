// Look-ups in embedding tables of 8, 4, 3 and 2 bits per value (kernels/tables.py gives the row format).
#pragma once

#include <cstdint>
#include <vector>

namespace octet {

struct Table {
  const uint8_t* rows;
  int64_t count, stride, dim;  // rows, bytes of a row, values of a row
  int bits;                    // 8, 4, 3 or 2
  int64_t groups;              // of a row's values, each with its scale and bias
  const uint8_t* row(int64_t index) const { return rows + index * stride; }
};

// The groups of a row of `dim` values and `stride` bytes; 0 where no row is so long. Raises std::invalid_argument for bits of no
// table.
int64_t table_groups(int64_t bits, int64_t dim, int64_t stride);

// Raises std::out_of_range where one of `n` indices is no row of a table of `count`.
void check_indices(const int64_t* indices, int64_t n, int64_t count);

// out (n, dim) = the rows at `indices`, which were checked.
void look_up(const Table& table, const int64_t* indices, int64_t n, float* out);

// Indices, where each bag ends, and weights: checked, and without the padding row. They lie in the memory that was given, or
// in the vectors where that does not hold what is wanted; so a Bags is not copied.
struct Bags {
  // `offsets` are where the bags begin, with the end of the last one behind them where `include_last_offset`; weights (n,) may be
  // null, and padding_idx is -1 where no row is padding. Raises std::out_of_range.
  Bags(const Table& table, const int64_t* indices, int64_t n, const int64_t* offsets, int64_t size, const float* weights,
       bool include_last_offset, int64_t padding_idx);
  Bags(const Bags&) = delete;
  Bags& operator=(const Bags&) = delete;

  const int64_t *indices, *ends;  // ends: (count + 1,), the first is 0
  const float* weights;           // as long as indices, or null
  int64_t count;

 private:
  void leave_out(int64_t padding_idx);

  std::vector<int64_t> own_indices_, own_ends_;
  std::vector<float> own_weights_;
};

enum class BagMode { kSum, kMean, kMax };

// Bags worth a thread of their own.
constexpr int64_t kBagsPerThread = 64;

// out (bags, dim); what bags hold nothing is 0.
void look_up_bags(const Table& table, const Bags& bags, BagMode mode, float* out);

}  // namespace octet

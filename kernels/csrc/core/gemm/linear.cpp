#include "core/cpu/of_thread.h"
#include "core/gemm/linear.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/gemm/narrow_gemm.h"
#include "core/gemm/word_rows.h"
#include "core/gemm/workspace.h"
#include "core/rows/wrapping.h"

namespace octet {
namespace {

// Bytes of quantised rows that stay in a core's own cache while a weight goes past them, and of a weight that does not.
constexpr int64_t kCachedRows = 1 << 19, kSharedWeight = 1 << 18;
// Sums that stay there; and of a weight with scales by group, which is unpacked for each block of rows, the reals, and rows at least.
constexpr int64_t kCachedSums = 1 << 16, kCachedReals = 1 << 18, kUnpackedRows = 256;

RowRange range_of_all(const Linear& layer, const float* x, int64_t ldx, int64_t m, int top) {
  float low = 0.0f, high = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < m; ++i) {
    float row_low, row_high;
    finite &= row_kernels().min_max(x + i * ldx, layer.columns, layer.gemm->k(), &row_low, &row_high);
    low = std::min(low, row_low);
    high = std::max(high, row_high);
  }
  return choose_range(low, high, finite, top);
}

// Parts of a weight that rows pass one after the other. Vectors hide behind their products that a weight is read again for each
// kRowBlock: on a Zen 5 parts took them 2 to 5 % more.
int parts_of(const PackedGemm& gemm, int64_t m) {
  return gemm.takes_whole(m) ? static_cast<int>(std::max<int64_t>(1, gemm.n() * gemm.k() / kSharedWeight)) : 1;
}

// Rows that are quantised and multiplied together.
int64_t rows_at_once(const PackedGemm& gemm, int64_t m, bool by_group) {
  if (!gemm.takes_whole(m)) return kRowBlock;
  const int64_t least = by_group ? kUnpackedRows : kRowBlock;
  const int64_t most = std::max(least, kCachedRows / std::max<int64_t>(gemm.k(), 1)), blocks = (m + most - 1) / most;
  return (m + blocks - 1) / blocks;
}

struct QuantizedRows {
  const uint8_t *q, *q_low;  // low bytes of 16 bits, or null
  int64_t ld, m;
  const RowRange* ranges;
  int64_t next_range;  // 1; 0 where one is for all rows
};

// The reals of outputs [begin, end) of rows [first, first + count) from their sums, which lie `ld` apart.
void leave_reals(const QuantizedRows& rows, int64_t first, int64_t count, const Channels& all, int64_t begin, int64_t end,
                 const int32_t* sums, const int32_t* low, int64_t ld, bool relu, float* y) {
  const Channels channels{end - begin, all.row_sums + begin, all.scale + begin, all.bias ? all.bias + begin : nullptr};
  for (int64_t i = 0; i < count; ++i)
    row_kernels().dequantize_sums(sums + i * ld + begin, low ? low + i * ld + begin : nullptr,
                                  rows.ranges[(first + i) * rows.next_range], channels, relu, y + (first + i) * all.n + begin);
}

// Products of quantised rows as reals. Of a large weight all rows go past one part, and then past the next, in blocks whose
// sums stay in the cache.
void products_to_reals(const PackedGemm& gemm, const QuantizedRows& rows, const Channels& channels, bool relu, float* y,
                       int64_t threads, Workspace& space) {
  const int64_t n = gemm.n();
  const auto multiply = [&](int64_t first, int64_t count, int32_t* sums, int32_t* low, int64_t ld, int part, int parts) {
    gemm.run(rows.q + first * rows.ld, rows.ld, count, sums, ld, part, parts);
    if (low) gemm.run(rows.q_low + first * rows.ld, rows.ld, count, low, ld, part, parts);
  };
  if (threads > 1 || rows.m <= kRowBlock) {
    int32_t* const sums = space.sums.get(rows.m * n);
    int32_t* const low = rows.q_low ? space.sums_low.get(rows.m * n) : nullptr;
    const int parts = static_cast<int>(threads);
    const auto leave = [&](int64_t begin, int64_t end) {
      if (begin < end) leave_reals(rows, 0, rows.m, channels, begin, end, sums, low, n, relu, y);
    };
    // Where it is known which outputs are whose, a thread also leaves the reals of its own: their sums are in its cache.
    const bool apart = gemm.first_output(parts, parts) == n;
    each_thread(threads, [&](int64_t thread) {
      const int part = static_cast<int>(thread);
      multiply(0, rows.m, sums, low, n, part, parts);
      if (apart) leave(gemm.first_output(part, parts), gemm.first_output(part + 1, parts));
    });
    if (!apart) leave(0, n);
    return;
  }
  const int parts = parts_of(gemm, rows.m);
  for (int part = 0; part < parts; ++part) {
    const int64_t begin = gemm.first_output(part, parts), end = gemm.first_output(part + 1, parts), ld = end - begin;
    if (ld == 0) continue;
    // A product wants the place of output 0, which lies `begin` values before those of this part.
    const int64_t block = gemm.takes_whole(rows.m) ? std::max(kRowBlock, kCachedSums / ld) : kRowBlock;
    int32_t* const sums = space.sums.get(n + block * ld) + n - begin;
    int32_t* const low = rows.q_low ? space.sums_low.get(n + block * ld) + n - begin : nullptr;
    for (int64_t first = 0; first < rows.m; first += block) {
      const int64_t count = std::min(block, rows.m - first);
      multiply(first, count, sums, low, ld, part, parts);
      leave_reals(rows, first, count, channels, begin, end, sums, low, ld, relu, y);
    }
  }
}

struct GroupRoom {
  Scratch<float> reals, reals_low;
  Scratch<int32_t> zeros, zeros_low;
  RealsAsSums as_sums;
};

// The same over a weight whose scales are by group (equation 11).
void groups_to_reals(const GroupedGemm& gemm, const QuantizedRows& rows, const float* bias, bool relu, float* y,
                     int64_t threads) {
  thread_local GroupRoom* own = nullptr;
  auto& [reals, reals_low, zeros, zeros_low, as_sums] = of_thread(own);
  const int64_t n = gemm.n();
  int32_t* const zero = zeros.get(rows.m);
  int32_t* const zero_low = zeros_low.get(rows.m);
  for (int64_t i = 0; i < rows.m; ++i) {
    const int32_t whole = rows.ranges[i * rows.next_range].zero_point;
    zero[i] = rows.q_low ? whole >> 8 : whole;
    zero_low[i] = whole & 255;
  }
  // Part `one` of `all` to `high` and `low`, which are the place of output 0.
  const auto multiply = [&](float* high, float* low, int64_t ld, int one, int all) {
    gemm.run_reals(rows.q, rows.ld, rows.m, zero, high, ld, one, all, false);
    if (low) gemm.run_reals(rows.q_low, rows.ld, rows.m, zero_low, low, ld, one, all, false);
  };
  const int parts = threads == 1 && gemm.takes_whole(rows.m) ? static_cast<int>((rows.m * n + kCachedReals - 1) / kCachedReals) : 1;
  for (int part = 0; part < parts; ++part) {
    const int64_t begin = gemm.first_output(part, parts), end = gemm.first_output(part + 1, parts), ld = end - begin;
    if (ld == 0) continue;
    float* const high = reals.get(n + rows.m * ld) + n;
    float* const low = rows.q_low ? reals_low.get(n + rows.m * ld) + n : nullptr;
    if (parts > 1)
      multiply(high - begin, low ? low - begin : nullptr, ld, part, parts);
    else
      each_thread(threads, [&](int64_t thread) { multiply(high, low, n, static_cast<int>(thread), static_cast<int>(threads)); });
    const int32_t* const sums = as_sums.sums(ld);
    for (int64_t i = 0; i < rows.m; ++i) {
      float* const row = high + i * ld;
      if (low)
        for (int64_t j = 0; j < ld; ++j) row[j] = row[j] * 256.0f + low[i * ld + j];
      row_kernels().dequantize_sums(sums, nullptr, {rows.ranges[i * rows.next_range].scale, 0},
                                    as_sums.channels(ld, row, bias ? bias + begin : nullptr), relu, y + i * n + begin);
    }
  }
}

}  // namespace

RowRange range_of(const float* x, const float* columns, int64_t k, int top) {
  float low, high;
  const bool finite = row_kernels().min_max(x, columns, k, &low, &high);
  return choose_range(low, high, finite, top);
}

void linear_rows(const Linear& layer, const RowRange* shared, const float* x, int64_t ldx, int64_t m, float* y,
                 int64_t threads, Workspace& space) {
  const RowKernels& kernels = row_kernels();
  const int64_t k = layer.gemm->k(), n = layer.gemm->n(), ldq = padded_row(k);
  const int top = layer.bits == 16 ? 65535 : 255;
  uint8_t* q = space.q.get(m * ldq);
  uint8_t* q_low = layer.bits == 16 ? space.q_low.get(m * ldq) : nullptr;
  RowRange* ranges = space.ranges.get(m);
  for (int64_t i = 0; i < m; ++i) {
    ranges[i] = shared ? *shared : range_of(x + i * ldx, layer.columns, k, top);
    kernels.quantize(x + i * ldx, layer.columns, k, ranges[i], top, q + i * ldq, q_low ? q_low + i * ldq : nullptr);
  }
  const QuantizedRows rows{q, q_low, ldq, m, ranges, 1};
  if (const GroupedGemm* const groups = groups_of(*layer.gemm, layer.scale))
    return groups_to_reals(*groups, rows, layer.bias, layer.relu, y, threads);
  const Channels channels{n, layer.gemm->row_sums(), layer.scale, layer.bias};
  products_to_reals(*layer.gemm, rows, channels, layer.relu, y, threads, space);
}

Workspace& workspace(int level) {
  thread_local Workspace* spaces[2] = {};
  return of_thread(spaces[level]);
}

StaticOutput requantized_output(int64_t zero_point, int64_t bottom, int64_t top) {
  const auto check = [](int64_t value, const char* name) {
    if (value < 0 || value > 255)
      throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", expected 0 to 255");
  };
  check(zero_point, "output_zero_point"), check(bottom, "quant_min"), check(top, "quant_max");
  if (bottom > top)
    throw std::invalid_argument("quant_min is " + std::to_string(bottom) + ", above quant_max, " + std::to_string(top));
  StaticOutput output;
  output.zero_point = static_cast<int32_t>(zero_point);
  output.bottom = static_cast<int32_t>(bottom);
  output.top = static_cast<int32_t>(top);
  return output;
}

void finish_row(const StaticOutput& output, int32_t* sums, int64_t index, int64_t n, int32_t zero_point,
                const int32_t* row_sums, const int32_t* bias) {
  row_kernels().remove_zero_point(sums, zero_point, row_sums, bias, n);
  if (output.reals)
    for (int64_t j = 0; j < n; ++j) output.reals[index * n + j] = static_cast<float>(sums[j]) * output.multiplier[j];
  if (output.quantized)
    row_kernels().requantize(sums, output.multiplier, 1, n, output.zero_point, output.bottom, output.top,
                             output.quantized + index * n);
}

void add_residual(const StaticOutput& output, const uint8_t* own, int64_t first, int64_t count) {
  const uint8_t* other = output.residual->other + first;
  const bool left = output.residual->first;
  element_kernels().add(output.residual->by, left ? own : other, 1, left ? other : own, 1, count, output.quantized + first);
}

float largest(const float* multiplier, int64_t n) {
  // Without its sign the larger float has the larger bits, a NaN the largest, and integers are compared as vectors.
  int32_t most = 0;
  for (int64_t j = 0; j < n; ++j) most = std::max(most, __builtin_bit_cast(int32_t, multiplier[j]) & 0x7fffffff);
  return __builtin_bit_cast(float, most);
}

Requantize requantize_of(const StaticOutput& output, int64_t n, int32_t zero_point, const int32_t* row_sums,
                         const int32_t* bias) {
  int32_t* offset = workspace().offset.get(n + kSlack);
  float* multiplier = workspace().multiplier.get(n + kSlack);
  for (int64_t j = 0; j < n; ++j) offset[j] = wrapped_sum(bias ? bias[j] : 0, -zero_point * row_sums[j]);
  std::copy_n(output.multiplier, n, multiplier);
  return {offset, multiplier, output.zero_point, output.bottom, output.top, largest(multiplier, n) < 1.0f};
}

bool outputs_are_shared(const PackedGemm& gemm, int64_t products) {
  return gemm.n() >= 256 * threads_for(products) && gemm.n() * gemm.k() >= kSharedWeight;
}

void linear_dynamic(const Linear& layer, const float* x, int64_t ldx, int64_t m, float* y) {
  const int64_t n = layer.gemm->n();
  if (m == 0 || n == 0) return;  // rows without outputs could be as many as anybody says
  RowRange all{};
  if (!layer.per_row) all = range_of_all(layer, x, ldx, m, layer.bits == 16 ? 65535 : 255);
  const RowRange* shared = layer.per_row ? nullptr : &all;
  const int64_t products = m * n * layer.gemm->k() * (layer.bits / 8);
  const auto some = [&](int64_t first, int64_t rows, int64_t threads) {
    linear_rows(layer, shared, x + first * ldx, ldx, rows, y + first * n, threads, workspace());
  };
  each_block(m, products, some, rows_at_once(*layer.gemm, m, groups_of(*layer.gemm, layer.scale) != nullptr));
}

void linear_direct(const PackedGemm& gemm, const uint8_t* q_x, int64_t m, const Requantize& by,
                   const StaticOutput& output) {
  const int64_t k = gemm.k(), n = gemm.n(), block = std::max(kRowBlock, kCachedRows / k / kRowBlock * kRowBlock);
  const bool wide = outputs_are_shared(gemm, m * n * k), lie_there = k % 4 == 0;
  each_share(m, m * n * k, block, wide, [&](int64_t first, int64_t rows, int part, int parts) {
    const uint8_t* x = q_x + first * k;
    if (!lie_there) {
      uint8_t* const own = workspace().q.get(rows * word_row(k));
      copy_to_words(x, k, rows, own);
      x = own;
    }
    if (output.reals)
      gemm.run_f32(x, word_row(k), rows, by, output.reals + first * n, n, part, parts);
    else
      gemm.run_u8(x, word_row(k), rows, by, output.quantized + first * n, n, part, parts);
  });
}

void linear_static(const PackedGemm& gemm, const uint8_t* q_x, int32_t zero_point, int64_t m, const int32_t* bias,
                   const StaticOutput& output) {
  const int64_t k = gemm.k(), n = gemm.n(), ldq = padded_row(k);
  if (m == 0 || n == 0) return;
  if (!output.sums && gemm.requantizes() && k > 0)
    return linear_direct(gemm, q_x, m, requantize_of(output, n, zero_point, gemm.row_sums(), bias), output);
  each_block(m, m * n * k, [&](int64_t first, int64_t rows, int64_t threads) {
    Workspace& space = workspace();
    // A copy with room around it: the kernels read a little past each row.
    uint8_t* q = space.q.get(rows * ldq);
    for (int64_t i = 0; i < rows; ++i) std::copy_n(q_x + (first + i) * k, k, q + i * ldq);
    int32_t* sums = output.sums ? output.sums + first * n : space.sums.get(rows * n);
    each_thread(threads, [&](int64_t thread) {
      gemm.run(q, ldq, rows, sums, n, static_cast<int>(thread), static_cast<int>(threads));
    });
    for (int64_t i = 0; i < rows; ++i)
      finish_row(output, sums + i * n, first + i, n, zero_point, gemm.row_sums(), bias);
  });
}

void linear_reals(const PackedGemm& gemm, const uint8_t* q_x, int64_t m, RowRange range, const float* scale,
                  const float* bias, float* y) {
  const int64_t k = gemm.k(), n = gemm.n(), ldq = padded_row(k);
  if (m == 0 || n == 0) return;
  const Channels channels{n, gemm.row_sums(), scale, bias};
  const auto some = [&](int64_t first, int64_t rows, int64_t threads) {
    Workspace& space = workspace();
    uint8_t* q = space.q.get(rows * ldq);
    for (int64_t i = 0; i < rows; ++i) std::copy_n(q_x + (first + i) * k, k, q + i * ldq);
    products_to_reals(gemm, {q, nullptr, ldq, rows, &range, 0}, channels, false, y + first * n, threads, space);
  };
  each_block(m, m * n * k, some, rows_at_once(gemm, m, false));
}

}  // namespace octet

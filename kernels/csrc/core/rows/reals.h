// Float32 steps between int8 layers: one table per instruction set, all compiled from reals.inc. Unlike integers these may
// differ in their last bits from table to table and from torch's own; on one machine every caller gets the same bits.
#pragma once

#include <cstdint>

namespace octet {

// Floats that `sum_taps` may read and write past its rows.
constexpr int64_t kTapRoom = 64;

// One head of attention: `queries` rows against `keys` keys, all `width` wide, and values that are `values` wide.
struct HeadShape {
  int64_t keys, width, values;
  float scale;  // of the scores
  bool causal;  // query i sees keys 0 to i
  int64_t packed_keys, packed_values;  // rounded up to RealKernels::columns
};

// The mask added to the scaled scores of one head: for query i and key j it is data[i * row + j * step].
struct HeadMask {
  const float* data;  // or null
  int64_t row, step;
};

// out = a + b, say; steps are 1, or 0 where one value meets the whole row.
using RealBinary = void (*)(const float* a, int64_t a_step, const float* b, int64_t b_step, int64_t n, float* out);

// Functions of one value, in the order of their words in core/plan/settings.inc. Those before kExp are one or two correctly
// rounded operations and so the same on every machine.
enum class RealFunction { kNeg, kAbs, kSqrt, kRsqrt, kExp, kSigmoid, kTanh, kCos, kSin, kGelu };
constexpr int kRealFunctions = 10;
using RealUnary = void (*)(const float* x, int64_t n, float* out);

// Keys of bytes lie in blocks of so many, the first value of each, then the second, and so on.
constexpr int64_t kKeysOfBlock = 16;
// Rows that `score_bytes` and `mix_bytes` take at most.
constexpr int64_t kRowsOfBytes = 4;

struct RealKernels {
  RealBinary add, subtract, multiply, divide;  // one operation of float32, so the same on every machine
  RealUnary functions[kRealFunctions];
  // The sum of a row; of each of the first `columns` columns of x (n, ld), with the bits that `sum` gives for it as a row.
  float (*sum)(const float* x, int64_t n);
  void (*sum_columns)(const float* x, int64_t n, int64_t ld, int64_t columns, float* sums);
  // A row of the softmax of x, or of its logarithm. NaN where all of x is -inf, as torch has it.
  void (*softmax)(const float* x, int64_t n, bool logarithm, float* out);
  // x / (1 + e**-x).
  void (*silu)(const float* x, int64_t n, float* out);
  // A row of x, or of x + added where that is not null: (v - mean) / sqrt(variance + eps) * weight + bias. weight and bias
  // may be null.
  void (*layer_norm)(const float* x, const float* added, int64_t n, const float* weight, const float* bias, float eps,
                     float* out);
  // A row: x / sqrt(mean of the squares + eps) * weight. weight may be null.
  void (*rms_norm)(const float* x, int64_t n, const float* weight, float eps, float* out);
  // Over `pixels` pixels of `channels` values each: sums[c] += x[c]; of x[c] - mean[c] the sums, and behind these the sums of the
  // squares; and (x - mean) * factor + shift.
  void (*sum_channels)(const float* x, int64_t pixels, int64_t channels, float* sums);
  void (*sum_differences)(const float* x, int64_t pixels, int64_t channels, const float* mean, float* sums);
  void (*scale_channels)(const float* x, int64_t pixels, int64_t channels, const float* mean, const float* factor,
                         const float* shift, float* out);
  // Queries that are multiplied together, and what packed rows are rounded up to.
  int64_t queries, columns;
  // k (keys, width) with rows `ld` apart -> (packed_keys / columns, width, columns), zero past the last key.
  void (*pack_keys)(const float* k, int64_t ld, const HeadShape& shape, float* packed);
  // v (keys, values) with rows `ld` apart -> (keys, packed_values), zero past the last column.
  void (*pack_values)(const float* v, int64_t ld, const HeadShape& shape, float* packed);
  // softmax(q k' * scale + mask) v for queries [first, first + count); their rows in q and out are `ldq` and `ldout` apart. v has
  // rows `ldv` apart that are packed_values long. room: count * (packed_keys + packed_values + 1).
  void (*attend)(const HeadShape& shape, const float* q, int64_t ldq, int64_t first, int64_t count, const float* k,
                 const float* v, int64_t ldv, const HeadMask& mask, float* room, float* out, int64_t ldout);
  // scores[r * ld + j] = the sum over i of q[r * ldq + i] * keys[j / 16][i][j % 16], for the keys j of `blocks` blocks (blocks, width, 16).
  void (*score_bytes)(const float* q, int64_t ldq, int64_t rows, const int8_t* keys, int64_t blocks, int64_t width, float* scores,
                      int64_t ld);
  // out[r * ldout + i] = the sum over j of weights[r * ld + j] * values[j][i], for values (keys, width).
  void (*mix_bytes)(const float* weights, int64_t ld, int64_t rows, const int8_t* values, int64_t keys, int64_t width, float* out,
                    int64_t ldout);
  // out[i] = first + the sum over taps t, in their order, of x[offsets[t] + i] * weight[t], for i in [0, n); kTapRoom more may
  // be read and written.
  void (*sum_taps)(const float* x, const int64_t* offsets, const float* weight, int64_t taps, float first, int64_t n, float* out);
  // out[i] = x[2 * i] for i in [0, n).
  void (*every_second)(const float* x, int64_t n, float* out);
};

const RealKernels& real_kernels();

}  // namespace octet

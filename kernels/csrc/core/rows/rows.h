// Operations on a row besides products: ranges, quantisation, scales, gates. One table per instruction set, all compiled from
// rows.inc without contraction to FMA, so that all tables give the same bits.
#pragma once

#include <cstdint>

namespace octet {

// Scale and zero point of one row of activations. scale is NaN where the row held NaN or inf, so that whatever is
// computed from the row is NaN, as it would be in float.
struct RowRange {
  float scale;
  int32_t zero_point;
};

// The operands that turn the sums of one row into floats (equation 6).
struct Channels {
  int64_t n;
  const int32_t* row_sums;  // (n,), of the weight
  const float* scale;       // (n,), of the weight
  const float* bias;        // (n,) or null
};

struct FakeQuantizer {
  float scale, zero_point, bottom, top;  // the integers, as floats
  float low, high;                       // of the clamp before; infinite where there is none
};

// Those of the hidden units of a recurrent layer that are computed.
struct Units {
  int64_t begin, end;
};

// `units` of one step of one sample of a recurrent layer. `input` holds the input projection with its bias, (gates * hidden,), and
// `sums` the recurrent products of q(h), whose range and channels are given; c is updated in place.
using CellStep = void (*)(const float* input, const int32_t* sums, RowRange range, const Channels& channels,
                          int64_t hidden, Units units, const float* h_before, float* c, float* h);

// RecurrentKind (kernels/recurrent/kind.py), whose fields are named alike.
struct CellKind {
  const char* name;
  int64_t gates;
  bool has_cell;     // c, which other kinds are not given
  bool sums_biases;  // else channels.bias holds the recurrent one
  bool projects;
  CellStep step;
};

struct Normalizer {
  const float *scale, *shift;  // of each plane
  float low, high;             // infinite where there is no clamp
  bool contracted;             // whether x * scale is rounded only with the sum
};

constexpr int64_t kIndexRoom = 16;

struct RowKernels {
  // Smallest and largest of x * columns (columns may be null), 0 included; false where one is NaN or inf.
  bool (*min_max)(const float* x, const float* columns, int64_t k, float* low, float* high);
  // Equation 2 with top = 255: q; with top = 65535: the high bytes to q and the low bytes to q_low. False where a value
  // is NaN or inf, which no integer says.
  bool (*quantize)(const float* x, const float* columns, int64_t k, RowRange range, int top, uint8_t* q,
                   uint8_t* q_low);
  bool (*all_finite)(const float* x, int64_t n);  // neither NaN nor inf
  // Equation 6: out = (sums without zero point) * (range.scale * scale) + bias. `low` is null for 8-bit activations.
  void (*dequantize_sums)(const int32_t* sums, const int32_t* low, RowRange range, const Channels& channels, bool relu,
                          float* out);
  // Equation 7: sums (zero points already removed, bias added) * multiplier, rounded half to even, plus zero_point, in
  // [bottom, top]. step is 1 for a multiplier per channel and 0 for one for all.
  void (*requantize)(const int32_t* sums, const float* multiplier, int step, int64_t n, int32_t zero_point,
                     int32_t bottom, int32_t top, uint8_t* out);
  // sums - zero_point * row_sums + bias, in place; bias may be null.
  void (*remove_zero_point)(int32_t* sums, int32_t zero_point, const int32_t* row_sums, const int32_t* bias, int64_t n);
  void (*dequantize)(const uint8_t* q, int64_t n, float scale, int32_t zero_point, float* out);
  const CellKind* cells;  // of recurrent layers; the last has no name
  // Sums of one pixel of a depthwise convolution: sums[c] = sum over taps t of
  // x[offsets[t] + c] * weight[t * channels + c].
  void (*depthwise)(const uint8_t* x, const int64_t* offsets, int64_t taps, const int8_t* weight, int64_t channels,
                    int32_t* sums);
  // low and high take in the smallest and largest of planes (planes, inner) that lie one after the other, and totals (planes,),
  // which may be null, get the `sum` of each; false where a value is NaN or inf, and then they mean nothing.
  bool (*extremes)(const float* x, int64_t planes, int64_t inner, float* low, float* high, double* totals);
  // For a histogram (reference_histogram.histogram): bin = trunc(x[i] * inverse), at most half - 1 and at least -half; `index`
  // gets bin + half for each bin that is not 0, in their order, and has room for kIndexRoom more. Returns how many. inverse is
  // a power of two; x is finite.
  int64_t (*bin_indices)(const float* x, int64_t n, float inverse, int32_t half, uint16_t* index);
  // Of x, and of the float32 (x - mean)**2: sixteen sums in double, of every sixteenth value, and theirs by halves.
  double (*sum)(const float* x, int64_t n);
  double (*squares)(const float* x, int64_t n, float mean);
  // One packed row of an embedding table (kernels/tables.py) of `bits` per value as `dim` reals.
  void (*table_row)(const uint8_t* row, int bits, int64_t dim, float* out);
  // Equations 2 and 1 of x clamped to (low, high), without leaving float32; `inside`, which may be null, says where
  // rounding, not clamping, decided.
  void (*fake_quantize)(const float* x, int64_t n, const FakeQuantizer& by, float* out, bool* inside);
  // grad where `inside`, else 0.
  void (*masked)(const float* grad, const bool* inside, int64_t n, float* out);
  // x * scale + shift of each plane, clamped, in place, NaN stays NaN; and the `extremes` of that.
  bool (*normalize_planes)(float* x, int64_t planes, int64_t inner, const Normalizer& by, float* low, float* high, double* totals);
  // sums[c] += x[r * columns + c], a row after the other.
  void (*add_columns)(const float* x, int64_t rows, int64_t columns, double* sums);
};

const RowKernels& row_kernels();

// Equations 3 and 4 for [0, top]; low <= 0 <= high.
RowRange choose_range(float low, float high, bool finite, int top);

}  // namespace octet

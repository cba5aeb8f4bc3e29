// The typed operations of a plan: one structure for each operation, with the numbers of the values that it reads, and its
// settings as the kernels take them. Shapes are not known here: one program serves all inputs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/plan/plan.h"
#include "core/plan/sizes.h"
#include "core/rows/elementwise.h"
#include "core/rows/reals.h"
#include "core/rows/rows.h"

namespace octet {

// Values are numbered densely: the program's inputs, then one of each operation, in order.
using Value = int;
constexpr Value kNoValue = -1;
// An index into the program's constants.
using Constant = int;
constexpr Constant kNoConstant = -1;
// An index into the program's operations.
using Place = int;
constexpr Place kNowhere = -1;

namespace op {

// Elementwise operations.
struct Quantize {
  Value x;
  RowRange range;
  bool for_linear = false;  // pass: a linear layer or a product reads it, which wants plain rows
};
struct Dequantize {
  Value q;
  float scale;
  int32_t zero_point;
  bool given_out = false;  // pass
};
struct Clamp {
  Value x;
  float low, high;
};
struct Lookup {
  Value q;
  Constant table;
  int64_t axis;
};
struct Add {
  Value a, b;
  AddSettings by;
};
// Any operator of core/rows/binary.inc.
struct Binary {
  Value a, b;
  const BinaryKind* kind;
  BinarySettings by;
};

// The output of a layer's sums: float32, or uint8 in [bottom, top].
struct Finish {
  Constant bias, multiplier;
  bool real;
  int32_t zero_point, bottom, top;
};
struct Conv {
  Value x;
  int32_t zero_point;
  Constant weight;
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;
  Finish finish;
  Place sum = kNowhere;  // pass: the Add that alone reads the outputs
  bool given_out = false;  // pass
};
struct Linear {
  Value x;
  int32_t zero_point;
  Constant weight;
  Finish finish;
};

// Settings of windows have one value per spatial dimension.
struct MaxPool {
  Value q;
  std::vector<int64_t> kernel, stride, padding, dilation;
  bool ceil_mode;
};
struct AvgPool {
  Value q;
  std::vector<int64_t> kernel, stride, padding;
  bool ceil_mode, count_padding;
  int64_t divisor;  // 0: what the window holds
  MeanSettings by;
};
struct AdaptivePool {
  Value q;
  std::vector<int64_t> size;  // -1: as the input's
  bool largest;
  MeanSettings by;  // of means
};
struct Mean {
  Value q;
  std::vector<int64_t> dims;
  bool keepdim;
  MeanSettings by;
};

enum class Resizing { kNearest, kNearestExact, kLinear };
struct Interpolate {
  Value q;
  // One of the two; `one_for_all` where it is one number for all dimensions.
  std::vector<SizeParts> size;
  std::vector<double> factors;
  bool one_for_all, recompute, align_corners;
  Resizing mode;
  int64_t dims;  // that the mode is for, or 0 for any
  RescaleSettings by;
};

// Operations that only move values.
enum class PadMode { kConstant, kReflect, kReplicate, kCircular };
struct Pad {
  Value q;
  std::vector<int64_t> widths;
  PadMode mode;
  int32_t fill;
};
struct Cat {
  std::vector<Value> tensors;
  int64_t dim;
  std::vector<RescaleSettings> by;  // one for each tensor, or none
};
struct Reshape {
  Value x;
  std::vector<SizeParts> shape;  // of values
};
struct Expand {
  Value x;
  std::vector<SizeParts> shape;  // -1: as the input's
};
// The value itself, where a size is the expected one.
struct Holds {
  Value x;
  SizeParts size;
  int64_t equals;
};
struct Flatten {
  Value x;
  int64_t start, end;
};
struct Permute {
  Value x;
  std::vector<int64_t> dims;
};
struct Transpose {
  Value x;
  int64_t dim0, dim1;
};
struct Unsqueeze {
  Value x;
  int64_t dim;
};
struct Squeeze {
  Value x;
  int64_t dim;
};
struct Slice {
  Value x;
  int64_t dim;
  std::optional<SizeParts> start, end;
  int64_t step;
};
struct Select {
  Value x;
  int64_t dim, index;
};
struct Chunk {
  Value x;
  int64_t chunks, dim, index;
};
struct Same {
  Value x;
};

// Operations computed in float32.
struct ConstantReal {
  Constant value;
};
// x and a number: x + number, number - x, ...
struct WithNumber {
  enum class By { kAdd, kSub, kSubFrom, kMul, kDiv };
  Value x;
  By by;
  float number;
};
struct BinaryReal {
  enum class By { kSub, kMul, kDiv };
  Value a, b;
  By by;
};
struct UnaryReal {
  Value x;
  RealFunction by;
};
struct ReduceReal {
  Value x;
  bool mean;  // else the sum
  std::vector<int64_t> dims;
  bool keepdim;
};
// a where the byte of the mask is not 0, else b.
struct WhereReal {
  Value mask, a, b;
};
struct CatReal {
  std::vector<Value> tensors;
  int64_t dim;
};
struct Softmax {
  Value x;
  bool logarithm;
  Place rounding = kNowhere;  // pass: a Quantize that reads it
};
struct AddReal {
  Value a, b;
  Place norm = kNowhere;  // pass: the LayerNorm that alone reads the sum
};
struct LayerNorm {
  Value x;
  Constant weight, bias;
  float eps;
  int64_t size;  // of a row; 0 is any
  Place rounding = kNowhere;  // pass: a Quantize that reads it
};
struct RmsNorm {
  Value x;
  Constant weight;
  float eps;
  int64_t size;  // of a row
};
struct GroupNorm {
  Value x;
  int64_t groups;  // 0: each channel is one, which has more than one pixel
  Constant weight, bias;
  float eps;
};
struct Silu {
  Value x;
};
struct Attention {
  Value q, k, v, mask;
  std::optional<float> scale;
  bool causal;
};

// Products of two activations.
struct Matmul {
  Value a, b;
  int32_t a_zero, b_zero;
  float multiplier;
  bool real;  // float32, else uint8 in [bottom, top]
  int32_t zero_point, bottom, top;
  bool turned = false;  // pass: dimensions of the result change places next
};

// A linear layer whose input is quantised as it comes.
struct DynamicLinear {
  Value x;
  Constant weight, scale, bias, columns;
  int bits;
  bool per_row;
};

// The rows of a table that indices name.
struct Embedding {
  Value x;
  Constant table;
  int64_t bits, dim;  // of a table of 8, 4, 3 or 2 bits (core/embedding/tables.h); 0 where its rows are float32
};

// The parts of x at some places of a dimension, in its stead the indices' dimensions. One below 0 counts from the end where `negative`.
struct IndexSelect {
  Value x;
  int64_t dim;
  Value index;
  bool negative;
};
// x with parts of the source added at places of a dimension: an index for each part, or for each value.
struct IndexAdd {
  Value x;
  int64_t dim;
  Value index, source;
};
struct ScatterAdd {
  Value x;
  int64_t dim;
  Value index, source;
};

// One direction of one recurrent layer. Its value are the states of all steps.
struct Recurrent {
  // Ranges known beforehand: of the input, of the state, and of what a projection reads.
  struct Ranges {
    RowRange input, state, projection;
    bool integers;  // the states are given as integers of their range
  };
  Value x, h, c;  // h and c: the first states, or kNoValue for zeros
  Constant weight_ih, scale_ih, weight_hh, scale_hh, bias_ih, bias_hh, weight_hr, scale_hr;
  const CellKind* kind;
  bool reverse;
  std::optional<Ranges> ranges;
  // Without them: of the input projection, as in DynamicLinear.
  Constant columns = kNoConstant;
  int bits = 8;
  bool per_row = true;
};
// The state after the last step of the recurrent layer that writes `y`.
struct FinalState {
  Value y;
  bool cell;  // c, else h
};

}  // namespace op

using OperationKind =
    std::variant<op::Quantize, op::Dequantize, op::Clamp, op::Lookup, op::Add, op::Binary, op::Conv, op::Linear, op::MaxPool,
                 op::AvgPool, op::AdaptivePool, op::Mean, op::Interpolate, op::Pad, op::Cat, op::Reshape, op::Flatten,
                 op::Permute, op::Transpose, op::Unsqueeze, op::Squeeze, op::Slice, op::Select, op::Chunk, op::Same,
                 op::AddReal, op::LayerNorm, op::Attention, op::Expand, op::Holds, op::ConstantReal, op::WithNumber,
                 op::BinaryReal, op::CatReal, op::Softmax, op::Matmul, op::GroupNorm, op::Silu, op::DynamicLinear,
                 op::Embedding, op::Recurrent, op::FinalState, op::UnaryReal, op::ReduceReal,
                 op::WhereReal, op::RmsNorm, op::IndexSelect, op::IndexAdd, op::ScatterAdd>;

struct Operation {
  Value out;
  OperationKind kind;
  std::vector<Value> reads;  // once for each mention, those of sizes among them
  std::string text;          // the line, for errors

  template <class Kind>
  const Kind* as() const {
    return std::get_if<Kind>(&kind);
  }
  [[noreturn]] void fail(const std::string& why) const;  // std::invalid_argument that quotes the line
};

struct Program {
  int inputs = 0;
  std::vector<Operation> operations;
  std::vector<Value> outputs;

  int values() const { return inputs + static_cast<int>(operations.size()); }
  // The operation that writes a value, or null for an input.
  const Operation* writer(Value value) const { return value < inputs ? nullptr : &operations[value - inputs]; }
};

// Reads and checks a text. Raises std::invalid_argument, which quotes the line.
Program parse_program(std::string_view text);

}  // namespace octet

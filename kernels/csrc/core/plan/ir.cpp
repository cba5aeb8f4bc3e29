#include "core/plan/ir.h"

#include <algorithm>
#include <map>
#include <stdexcept>

#include "core/plan/check.h"
#include "core/plan/text.h"
#include "core/rnn/rnn.h"

namespace octet {

void Operation::fail(const std::string& why) const { throw std::invalid_argument("plan line '" + text + "': " + why); }

namespace {

// One line that was checked, on its way to an operation: settings by name, registers as values.
class LineReader {
 public:
  LineReader(const PlanLine& line, const std::map<int64_t, Value>& values) : line_(line), values_(values) {}

  const PlanLine& line() const { return line_; }
  std::vector<Value> take_reads() { return std::move(reads_); }

  Value value(std::string_view name) { return value_of(line_.reg(name)); }
  Value value_or_none(std::string_view name) { return line_.has(name) ? value(name) : kNoValue; }
  std::vector<Value> values(std::string_view name) {
    std::vector<Value> found;
    for (const std::string& word : line_.words(name)) found.push_back(value_of(parse_register(line_, word)));
    return found;
  }
  SizeParts size(std::string_view word) {
    SizeParts parts = parse_size(line_, word);
    for (SizePart& part : parts)
      if (part.kind == SizePart::Kind::kDimension) part.of = value_of(part.of);
    return parts;
  }
  std::vector<SizeParts> sizes(std::string_view name) {
    std::vector<SizeParts> found;
    for (const std::string& word : line_.words(name)) found.push_back(size(word));
    return found;
  }
  std::optional<SizeParts> size_or_none(std::string_view name) {
    return line_.has(name) ? std::optional(size(line_.word(name))) : std::nullopt;
  }
  int64_t integer(std::string_view name) const { return line_.integer(name); }
  std::optional<int64_t> integer_or_none(std::string_view name) const {
    return line_.has(name) ? std::optional(line_.integer(name)) : std::nullopt;
  }
  int32_t byte(std::string_view name) const { return static_cast<int32_t>(line_.integer(name)); }
  float real(std::string_view name) const { return static_cast<float>(line_.number(name)); }
  bool flag(std::string_view name) const { return line_.flag(name); }
  Constant constant(std::string_view name) const { return static_cast<Constant>(line_.constant(name)); }
  std::vector<int64_t> integers(std::string_view name) const { return line_.integers(name); }

  // One setting per spatial dimension, from a list, a single number for all, or `fallback` where there is none.
  std::vector<int64_t> per_dimension(std::string_view name, const std::vector<int64_t>& fallback) const {
    if (!line_.has(name)) return fallback;
    std::vector<int64_t> given = line_.integers(name);
    if (given.size() == 1) given.resize(fallback.size(), given[0]);
    if (given.size() != fallback.size()) line_.fail(std::string(name) + " has another number of dimensions");
    return given;
  }

 private:
  Value value_of(int64_t reg) {
    reads_.push_back(values_.at(reg));  // check_plan found it written before
    return reads_.back();
  }

  const PlanLine& line_;
  const std::map<int64_t, Value>& values_;
  std::vector<Value> reads_;
};

op::Finish finish_of(const LineReader& in, bool real) {
  op::Finish finish{in.constant("q_bias"), in.constant("multiplier"), real, 0, 0, 255};
  if (real) return finish;
  finish.zero_point = in.byte("output_zero_point");
  finish.bottom = in.byte("quant_min"), finish.top = in.byte("quant_max");
  return finish;
}

template <bool real>
OperationKind conv(LineReader& in) {
  return op::Conv{in.value("q_x"),        in.byte("zero_point"),   in.constant("q_weight"), in.integers("stride"),
                  in.integers("padding"), in.integers("dilation"), in.integer("groups"),    finish_of(in, real)};
}

template <bool real>
OperationKind linear(LineReader& in) {
  return op::Linear{in.value("q_x"), in.byte("zero_point"), in.constant("q_weight"), finish_of(in, real)};
}

MeanSettings mean_settings(const LineReader& in) {
  return {in.byte("zero_point"), in.real("multiplier"), in.byte("output_zero_point")};
}

OperationKind max_pool(LineReader& in) {
  const std::vector<int64_t> kernel = in.integers("kernel");
  return op::MaxPool{in.value("q"),
                     kernel,
                     in.per_dimension("stride", kernel),
                     in.per_dimension("padding", std::vector<int64_t>(kernel.size(), 0)),
                     in.per_dimension("dilation", std::vector<int64_t>(kernel.size(), 1)),
                     in.flag("ceil_mode")};
}

OperationKind avg_pool(LineReader& in) {
  const std::vector<int64_t> kernel = in.integers("kernel");
  double window = 1;
  for (const int64_t size : kernel) window *= static_cast<double>(size);
  if (window >= 1 << 23) in.line().fail("its window holds more than 2**23 values");
  if (kernel.size() == 1 && in.line().fields.contains("divisor_override"))
    in.line().fail("a window of one dimension has no divisor_override");
  return op::AvgPool{in.value("q"),
                     kernel,
                     in.per_dimension("stride", kernel),
                     in.per_dimension("padding", std::vector<int64_t>(kernel.size(), 0)),
                     in.flag("ceil_mode"),
                     !in.line().has("count_include_pad") || in.flag("count_include_pad"),
                     in.integer_or_none("divisor_override").value_or(0),
                     mean_settings(in)};
}

template <bool largest>
OperationKind adaptive_pool(LineReader& in) {
  op::AdaptivePool pool{in.value("q"), {}, largest, largest ? MeanSettings{} : mean_settings(in)};
  for (const std::string& word : in.line().words("size"))
    pool.size.push_back(word == "-" ? -1 : parse_integer(in.line(), word));
  return pool;
}

RescaleSettings rescale_settings(int64_t zero_point, double multiplier, int32_t output_zero_point) {
  RescaleSettings settings{static_cast<int32_t>(zero_point), static_cast<float>(multiplier), output_zero_point, {}};
  settings.fill_table();
  return settings;
}

OperationKind interpolate(LineReader& in) {
  const PlanLine& line = in.line();
  const bool sized = line.has("size");
  const std::string& mode = line.word("mode");
  op::Interpolate interpolate{
      in.value("q"),
      {},
      sized ? std::vector<double>{} : line.numbers("scale_factor"),
      line.word(sized ? "size" : "scale_factor").find(',') == std::string::npos,
      in.flag("recompute_scale_factor"),
      in.flag("align_corners"),
      mode == "nearest" ? op::Resizing::kNearest : mode == "nearest-exact" ? op::Resizing::kNearestExact : op::Resizing::kLinear,
      mode == "linear" ? 1 : mode == "bilinear" ? 2 : 0,
      rescale_settings(in.integer("zero_point"), line.number("multiplier"), in.byte("output_zero_point"))};
  if (sized) interpolate.size = in.sizes("size");
  return interpolate;
}

OperationKind pad(LineReader& in) {
  const std::string& mode = in.line().word("mode");
  return op::Pad{in.value("q"), in.integers("widths"),
                 mode == "constant"    ? op::PadMode::kConstant
                 : mode == "reflect"   ? op::PadMode::kReflect
                 : mode == "replicate" ? op::PadMode::kReplicate
                                       : op::PadMode::kCircular,
                 in.byte("fill")};
}

OperationKind cat(LineReader& in) {
  op::Cat cat{in.values("tensors"), in.integer("dim"), {}};
  if (!in.line().has("multipliers")) return cat;
  const std::vector<int64_t> zeros = in.integers("zero_points");
  const std::vector<double> multipliers = in.line().numbers("multipliers");
  for (size_t i = 0; i < zeros.size(); ++i)
    cat.by.push_back(rescale_settings(zeros[i], multipliers[i], in.byte("output_zero_point")));
  return cat;
}

template <bool real>
OperationKind matmul(LineReader& in) {
  op::Matmul matmul{in.value("q_a"), in.value("q_b"), in.byte("a_zero_point"), in.byte("b_zero_point"), in.real("multiplier"),
                    real, 0, 0, 255};
  if (real) return matmul;
  matmul.zero_point = in.byte("output_zero_point");
  matmul.bottom = in.byte("quant_min"), matmul.top = in.byte("quant_max");
  return matmul;
}

// The place of a word in the list that the table of settings has for it.
template <class By>
By word_of(const LineReader& in, std::string_view name, std::initializer_list<std::string_view> words) {
  return static_cast<By>(std::find(words.begin(), words.end(), in.line().word(name)) - words.begin());
}

OperationKind attention(LineReader& in) {
  return op::Attention{in.value("q"), in.value("k"), in.value("v"), in.value_or_none("mask"),
                       in.line().has("scale") ? std::optional(in.real("scale")) : std::nullopt, in.flag("causal")};
}

OperationKind linear_dynamic(LineReader& in) {
  return op::DynamicLinear{in.value("x"),          in.constant("q_weight"),
                           in.constant("scale"),   in.constant("bias"),
                           in.constant("columns"), static_cast<int>(in.integer("bits")),
                           in.flag("per_row")};
}

// What static and dynamic recurrent layers have in common.
op::Recurrent recurrent(LineReader& in, std::string_view x) {
  return op::Recurrent{in.value(x),
                       in.value_or_none("h"),
                       in.value_or_none("c"),
                       in.constant("q_weight_ih"),
                       in.constant("scale_ih"),
                       in.constant("q_weight_hh"),
                       in.constant("scale_hh"),
                       in.constant("bias_ih"),
                       in.constant("bias_hh"),
                       in.constant("q_weight_hr"),
                       in.constant("scale_hr"),
                       find_cell(in.line().word("mode")),
                       in.flag("reverse"),
                       {}};
}

RowRange range_of(const LineReader& in, std::string_view scale, std::string_view zero_point) {
  return {in.real(scale), in.byte(zero_point)};
}

OperationKind rnn_static(LineReader& in) {
  op::Recurrent layer = recurrent(in, "q_x");
  layer.ranges = {range_of(in, "x_scale", "x_zero_point"), range_of(in, "h_scale", "h_zero_point"),
                  range_of(in, "m_scale", "m_zero_point"), in.flag("quantized")};
  return layer;
}

OperationKind rnn_dynamic(LineReader& in) {
  op::Recurrent layer = recurrent(in, "x");
  layer.columns = in.constant("columns_ih");
  layer.bits = static_cast<int>(in.integer("bits")), layer.per_row = in.flag("per_row");
  return layer;
}

// An operator of core/rows/binary.inc, whose line says which of its settings are values.
OperationKind binary(LineReader& in, const BinaryKind& kind) {
  std::vector<Value> values;
  std::vector<double> numbers;
  for (const Setting& setting : settings_of(in.line().op))
    if (setting.kind == "u8")
      values.push_back(in.value(setting.name));
    else
      numbers.push_back(in.line().number(setting.name));
  op::Binary operation{values.at(0), values.at(1), &kind, {}};
  kind.read(numbers.data(), &operation.by);
  return operation;
}

const BinaryKind* binary_kind(std::string_view name) {
  for (const BinaryKind* kind = element_kernels().binary; kind->line; ++kind)
    if (split(kind->line, ' ')[0] == name) return kind;
  return nullptr;
}

using Read = OperationKind (*)(LineReader&);

const std::map<std::string, Read, std::less<>>& readers() {
  static const std::map<std::string, Read, std::less<>> known = {
      {"quantize", [](LineReader& in) -> OperationKind {
         return op::Quantize{in.value("x"), {in.real("scale"), in.byte("zero_point")}};
       }},
      {"dequantize", [](LineReader& in) -> OperationKind {
         return op::Dequantize{in.value("q"), in.real("scale"), in.byte("zero_point")};
       }},
      {"clamp", [](LineReader& in) -> OperationKind { return op::Clamp{in.value("x"), in.real("low"), in.real("high")}; }},
      {"lookup", [](LineReader& in) -> OperationKind {
         return op::Lookup{in.value("q"), in.constant("table"), in.integer_or_none("axis").value_or(1)};
       }},
      {"add", [](LineReader& in) -> OperationKind {
         return op::Add{in.value("q_a"), in.value("q_b"),
                        {in.byte("a_zero_point"), in.byte("b_zero_point"), in.real("a_multiplier"), in.real("b_multiplier"),
                         in.byte("output_zero_point"), in.byte("quant_min"), in.byte("quant_max")}};
       }},
      {"conv_u8s8_u8", &conv<false>},
      {"conv_u8s8_f32", &conv<true>},
      {"linear_u8s8_u8", &linear<false>},
      {"linear_u8s8_f32", &linear<true>},
      {"max_pool", &max_pool},
      {"avg_pool", &avg_pool},
      {"adaptive_avg_pool", &adaptive_pool<false>},
      {"adaptive_max_pool", &adaptive_pool<true>},
      {"mean", [](LineReader& in) -> OperationKind {
         return op::Mean{in.value("q"), in.integers("dim"), in.flag("keepdim"), mean_settings(in)};
       }},
      {"interpolate", &interpolate},
      {"pad", &pad},
      {"cat", &cat},
      {"reshape", [](LineReader& in) -> OperationKind { return op::Reshape{in.value("x"), in.sizes("shape")}; }},
      {"expand", [](LineReader& in) -> OperationKind { return op::Expand{in.value("x"), in.sizes("shape")}; }},
      {"holds", [](LineReader& in) -> OperationKind {
         return op::Holds{in.value("x"), in.size(in.line().word("size")), in.integer("equals")};
       }},
      {"flatten", [](LineReader& in) -> OperationKind {
         return op::Flatten{in.value("x"), in.integer("start"), in.integer("end")};
       }},
      {"permute", [](LineReader& in) -> OperationKind { return op::Permute{in.value("x"), in.integers("dims")}; }},
      {"transpose", [](LineReader& in) -> OperationKind {
         return op::Transpose{in.value("x"), in.integer("dim0"), in.integer("dim1")};
       }},
      {"unsqueeze", [](LineReader& in) -> OperationKind { return op::Unsqueeze{in.value("x"), in.integer("dim")}; }},
      {"squeeze", [](LineReader& in) -> OperationKind { return op::Squeeze{in.value("x"), in.integer("dim")}; }},
      {"slice", [](LineReader& in) -> OperationKind {
         return op::Slice{in.value("x"), in.integer("dim"), in.size_or_none("start"), in.size_or_none("end"),
                          in.integer("step")};
       }},
      {"select", [](LineReader& in) -> OperationKind {
         return op::Select{in.value("x"), in.integer("dim"), in.integer("index")};
       }},
      {"chunk", [](LineReader& in) -> OperationKind {
         return op::Chunk{in.value("x"), in.integer("chunks"), in.integer("dim"), in.integer("index")};
       }},
      {"same", [](LineReader& in) -> OperationKind { return op::Same{in.value("x")}; }},
      {"add_f32", [](LineReader& in) -> OperationKind { return op::AddReal{in.value("a"), in.value("b")}; }},
      {"layer_norm", [](LineReader& in) -> OperationKind {
         return op::LayerNorm{in.value("x"), in.constant("weight"), in.constant("bias"), in.real("eps"),
                              in.integer_or_none("size").value_or(0)};
       }},
      {"instance_norm", [](LineReader& in) -> OperationKind {
         return op::GroupNorm{in.value("x"), 0, in.constant("weight"), in.constant("bias"), in.real("eps")};
       }},
      {"rms_norm", [](LineReader& in) -> OperationKind {
         return op::RmsNorm{in.value("x"), in.constant("weight"), in.real("eps"), in.integer("size")};
       }},
      {"group_norm", [](LineReader& in) -> OperationKind {
         return op::GroupNorm{in.value("x"), in.integer("groups"), in.constant("weight"), in.constant("bias"), in.real("eps")};
       }},
      {"silu", [](LineReader& in) -> OperationKind { return op::Silu{in.value("x")}; }},
      {"attention", &attention},
      {"constant", [](LineReader& in) -> OperationKind { return op::ConstantReal{in.constant("value")}; }},
      {"number_f32", [](LineReader& in) -> OperationKind {
         using By = op::WithNumber::By;
         return op::WithNumber{in.value("x"), word_of<By>(in, "by", {"add", "sub", "sub_from", "mul", "div"}), in.real("number")};
       }},
      {"binary_f32", [](LineReader& in) -> OperationKind {
         using By = op::BinaryReal::By;
         return op::BinaryReal{in.value("a"), in.value("b"), word_of<By>(in, "by", {"sub", "mul", "div"})};
       }},
      {"unary_f32", [](LineReader& in) -> OperationKind {
         using By = RealFunction;
         return op::UnaryReal{in.value("x"), word_of<By>(in, "by", {"neg", "abs", "sqrt", "rsqrt", "exp", "sigmoid", "tanh",
                                                                    "cos", "sin", "gelu"})};
       }},
      {"reduce_f32", [](LineReader& in) -> OperationKind {
         return op::ReduceReal{in.value("x"), in.line().word("by") == "mean", in.integers("dim"), in.flag("keepdim")};
       }},
      {"where_f32", [](LineReader& in) -> OperationKind {
         return op::WhereReal{in.value("mask"), in.value("a"), in.value("b")};
       }},
      {"cat_f32", [](LineReader& in) -> OperationKind { return op::CatReal{in.values("tensors"), in.integer("dim")}; }},
      {"softmax", [](LineReader& in) -> OperationKind { return op::Softmax{in.value("x"), in.flag("logarithm")}; }},
      {"linear_dynamic", &linear_dynamic},
      {"embedding", [](LineReader& in) -> OperationKind { return op::Embedding{in.value("x"), in.constant("weight"), 0, 0}; }},
      {"embedding_table", [](LineReader& in) -> OperationKind {
         return op::Embedding{in.value("x"), in.constant("rows"), in.integer("bits"), in.integer("dim")};
       }},
      {"index_select", [](LineReader& in) -> OperationKind {
         return op::IndexSelect{in.value("x"), in.integer("dim"), in.value("index"), in.flag("negative")};
       }},
      {"index_add", [](LineReader& in) -> OperationKind {
         return op::IndexAdd{in.value("x"), in.integer("dim"), in.value("index"), in.value("source")};
       }},
      {"scatter_add", [](LineReader& in) -> OperationKind {
         return op::ScatterAdd{in.value("x"), in.integer("dim"), in.value("index"), in.value("source")};
       }},
      {"rnn_static", &rnn_static},
      {"rnn_dynamic", &rnn_dynamic},
      {"final_state", [](LineReader& in) -> OperationKind {
         return op::FinalState{in.value("y"), in.line().word("of") == "c"};
       }},
      {"matmul", &matmul<false>},
      {"matmul_f32", &matmul<true>},
  };
  return known;
}

OperationKind read(LineReader& in) {
  if (const auto found = readers().find(in.line().op); found != readers().end()) return found->second(in);
  if (const BinaryKind* const kind = binary_kind(in.line().op)) return binary(in, *kind);
  in.line().fail("no such operation");
}

}  // namespace

Program parse_program(std::string_view text) {
  const PlanText parsed = parse_plan(text);
  check_plan(parsed);
  Program program;
  std::map<int64_t, Value> values;
  for (const int64_t reg : parsed.inputs) values.emplace(reg, program.inputs++);
  for (const PlanLine& line : parsed.lines) {
    LineReader in(line, values);
    OperationKind kind = read(in);
    const Value out = program.values();
    values.emplace(line.out, out);
    program.operations.push_back({out, std::move(kind), in.take_reads(), line.text});
  }
  for (const int64_t reg : parsed.outputs) program.outputs.push_back(values.at(reg));
  return program;
}

}  // namespace octet

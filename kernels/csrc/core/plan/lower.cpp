// From an operation to the function that lowers it; of those that a program is built for.
#include "core/plan/lower.h"

#include "core/cpu/selection.h"

namespace octet {
namespace {

// The names, in the text of a plan, of the operations that a structure stands for: one name at least has to be there. Without
// any it is always there; that is for structures which are small, and for new ones.
template <class Kind>
constexpr std::string_view kNames = "";
template <>
constexpr std::string_view kNames<op::Lookup> = "lookup";
template <>
constexpr std::string_view kNames<op::Add> = "add";
template <>
constexpr std::string_view kNames<op::Conv> = "conv_u8s8_u8 conv_u8s8_f32";
template <>
constexpr std::string_view kNames<op::Linear> = "linear_u8s8_u8 linear_u8s8_f32";
template <>
constexpr std::string_view kNames<op::MaxPool> = "max_pool";
template <>
constexpr std::string_view kNames<op::AvgPool> = "avg_pool";
template <>
constexpr std::string_view kNames<op::AdaptivePool> = "adaptive_avg_pool adaptive_max_pool";
template <>
constexpr std::string_view kNames<op::Mean> = "mean";
template <>
constexpr std::string_view kNames<op::Interpolate> = "interpolate";
template <>
constexpr std::string_view kNames<op::Cat> = "cat";
template <>
constexpr std::string_view kNames<op::AddReal> = "add_f32";
template <>
constexpr std::string_view kNames<op::LayerNorm> = "layer_norm";
template <>
constexpr std::string_view kNames<op::GroupNorm> = "group_norm instance_norm";
template <>
constexpr std::string_view kNames<op::Silu> = "silu";
template <>
constexpr std::string_view kNames<op::Attention> = "attention";
template <>
constexpr std::string_view kNames<op::WithNumber> = "number_f32";
template <>
constexpr std::string_view kNames<op::BinaryReal> = "binary_f32";
template <>
constexpr std::string_view kNames<op::CatReal> = "cat_f32";
template <>
constexpr std::string_view kNames<op::Softmax> = "softmax";
template <>
constexpr std::string_view kNames<op::UnaryReal> = "unary_f32";
template <>
constexpr std::string_view kNames<op::ReduceReal> = "reduce_f32";
template <>
constexpr std::string_view kNames<op::WhereReal> = "where_f32";
template <>
constexpr std::string_view kNames<op::RmsNorm> = "rms_norm";
template <>
constexpr std::string_view kNames<op::Matmul> = "matmul matmul_f32";
template <>
constexpr std::string_view kNames<op::DynamicLinear> = "linear_dynamic";
template <>
constexpr std::string_view kNames<op::Embedding> = "embedding embedding_table";
template <>
constexpr std::string_view kNames<op::IndexSelect> = "index_select";
template <>
constexpr std::string_view kNames<op::IndexAdd> = "index_add";
template <>
constexpr std::string_view kNames<op::ScatterAdd> = "scatter_add";
template <>
constexpr std::string_view kNames<op::Recurrent> = "rnn_static rnn_dynamic";

constexpr bool is_here(std::string_view names) {
  if (names.empty()) return true;
  const size_t end = names.find(' ');
  return has_operation(names.substr(0, end)) || (end != names.npos && has_operation(names.substr(end + 1)));
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation) {
  return std::visit(
      [&]<class Kind>(const Kind& kind) -> PlanView {
        if constexpr (is_here(kNames<Kind>))
          return lower(b, operation, kind);
        else
          operation.fail("this program was built without the operation, for another model");
      },
      operation.kind);
}

}  // namespace octet

#include "core/plan/prepared.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/plan/builder.h"
#include "core/plan/passes.h"

namespace octet {
namespace {

template <class T>
std::shared_ptr<const std::vector<T>> copied(const PlanConstant& constant, const char* dtype) {
  if (constant.dtype != dtype) return nullptr;
  const T* const first = static_cast<const T*>(constant.data);
  return std::make_shared<const std::vector<T>>(first, first + product(constant.sizes));
}

// The constants that operations name, by the lines, but for tables of look-ups and scales by group, which are read as they lie.
std::vector<bool> named_as_values(const Program& program, const std::vector<PlanConstant>& constants) {
  std::vector<bool> named(constants.size(), false);
  for (const Operation& operation : program.operations) {
    if (operation.as<op::Embedding>()) continue;
    const op::DynamicLinear* const linear = operation.as<op::DynamicLinear>();
    const std::string& line = operation.text;
    for (size_t at = line.find('$'); at != std::string::npos; at = line.find('$', at + 1)) {
      size_t index = constants.size();
      std::from_chars(line.data() + at + 1, line.data() + line.size(), index);
      if (index >= constants.size()) continue;
      const bool by_group = linear && linear->scale == static_cast<Constant>(index) && constants[index].sizes.size() > 1;
      if (!by_group) named[index] = true;
    }
  }
  return named;
}

PreparedConstant prepared(const PlanConstant& constant) {
  // Of three dimensions, bytes are a weight of few bits.
  const bool table = constant.sizes.size() < 3;
  PreparedConstant made{constant.dtype, constant.sizes, table ? copied<uint8_t>(constant, "uint8") : nullptr,
                        copied<int32_t>(constant, "int32"), copied<float>(constant, "float32"), true};
  if (made.reals) made.finite = std::all_of(made.reals->begin(), made.reals->end(), [](float one) { return std::isfinite(one); });
  return made;
}

}  // namespace

PreparedProgram::PreparedProgram(std::string_view text, const std::vector<PlanConstant>& constants)
    : program_(parse_program(text)) {
  run_passes(program_);
  for (size_t i = 0; i < constants.size(); ++i) check_extent(constants[i].sizes, "constant " + std::to_string(i));
  const std::vector<bool> values = named_as_values(program_, constants);
  for (size_t i = 0; i < constants.size(); ++i)
    constants_.push_back(values[i] ? prepared(constants[i])
                                   : PreparedConstant{constants[i].dtype, constants[i].sizes, nullptr, nullptr, nullptr, true});
}

std::unique_ptr<const Plan> PreparedProgram::build(const std::vector<PlanTensor>& inputs, WeightPacker& weights) const {
  auto plan = std::make_unique<Plan>();
  PlanBuilder(*this, weights, plan.get()).build(inputs);
  return plan;
}

}  // namespace octet

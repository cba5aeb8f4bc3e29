#include "core/plan/prepared.h"

#include <algorithm>
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

PreparedConstant prepared(const PlanConstant& constant) {
  PreparedConstant made{constant.dtype, constant.sizes, copied<uint8_t>(constant, "uint8"), copied<int32_t>(constant, "int32"),
                        copied<float>(constant, "float32"), true};
  if (made.reals) made.finite = std::all_of(made.reals->begin(), made.reals->end(), [](float one) { return std::isfinite(one); });
  return made;
}

}  // namespace

PreparedProgram::PreparedProgram(std::string_view text, const std::vector<PlanConstant>& constants)
    : program_(parse_program(text)) {
  run_passes(program_);
  for (const PlanConstant& constant : constants) constants_.push_back(prepared(constant));
}

std::unique_ptr<const Plan> PreparedProgram::build(const std::vector<PlanTensor>& inputs, WeightPacker& weights) const {
  auto plan = std::make_unique<Plan>();
  PlanBuilder(*this, weights, plan.get()).build(inputs);
  return plan;
}

}  // namespace octet

// Constants of a plan whose weights the core packs itself, for programs without torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/plan/plan.h"

namespace octet {

// `data` is contiguous and copied; dtype as in PlanConstant. Weights are packed once for all plans that are built with it.
PlanConstant own_constant(const void* data, const std::string& dtype, const std::vector<int64_t>& sizes);

}  // namespace octet

// A file of `quant.save(..., runner=True)`: safetensors with the plan of the whole model in its header. Reading it checks it; README.md
// lists what is checked.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/plan/plan.h"

namespace octet {

// The version of the runner's part of a file; a newer one is refused.
constexpr int64_t kFileVersion = 1;

// An input or output of a model.
struct ModelValue {
  std::string name, dtype;  // "float32", "uint8", "bool" or "int64"
  bool has_shape;           // whether the rank at export is known
  bool fixed_rank;          // whether another rank is refused
  Sizes sizes;              // -1 for one that may differ between calls
};

// What a file says; the constants point into its bytes.
struct Artefact {
  std::string plan;                // the text
  std::vector<std::string> steps;  // the name in the user's model for each operation of the text
  std::vector<PlanConstant> constants;
  std::vector<ModelValue> inputs, outputs;
};

// Sizes for errors, as (any, 3, 224, 224).
std::string shown(const Sizes& sizes);

// Raises std::invalid_argument with `name` in front, where the bytes are not a whole file of a version that this reads.
Artefact read_artefact(const uint8_t* bytes, size_t size, const std::string& name);

}  // namespace octet

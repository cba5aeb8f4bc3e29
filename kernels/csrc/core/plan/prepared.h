// A program prepared for any shapes: its text is parsed and checked, the passes have run, its constants are copied. Preparing
// is the slow part; a plan for the shapes of a call is then built from it, and run.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/plan/ir.h"
#include "core/plan/plan.h"

namespace octet {

// A constant as the steps of all plans use it; a copy of its values where it is neither a weight nor a table.
struct PreparedConstant {
  std::string dtype;
  Sizes sizes;
  std::shared_ptr<const std::vector<uint8_t>> bytes;     // of uint8
  std::shared_ptr<const std::vector<int32_t>> integers;  // of int32
  std::shared_ptr<const std::vector<float>> reals;       // of float32
  bool finite;                                           // all of them
};

class PreparedProgram {
 public:
  // Raises std::invalid_argument, which names the line, where the text is not a plan.
  PreparedProgram(std::string_view text, const std::vector<PlanConstant>& constants);

  // Raises std::invalid_argument, which names the line, where the text does not fit the constants or the shapes.
  std::unique_ptr<const Plan> build(const std::vector<PlanTensor>& inputs, WeightPacker& weights) const;

  const Program& program() const { return program_; }
  const std::vector<PreparedConstant>& constants() const { return constants_; }

 private:
  Program program_;
  std::vector<PreparedConstant> constants_;
};

}  // namespace octet

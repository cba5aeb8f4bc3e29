// A program that is ready for any shapes: its text read, checked and passed over, its constants at hand. Making it is the slow
// part; a plan for the shapes of a call is then built from it, and run.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/plan/ir.h"
#include "core/plan/plan.h"

namespace octet {

// What a constant is to the steps of every plan; a copy of its values where they are no weight.
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
  // Raises std::invalid_argument, which names the line, where the text is no plan.
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

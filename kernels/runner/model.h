// A model that is ready to run: a checked file, prepared, and its plans for the inputs that came.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "artefact.h"
#include "core/plan/own_weights.h"
#include "core/plan/prepared.h"
#include "octet.h"

namespace octet {

// An input that the model does not take.
class BadInput : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

class Model {
 public:
  // `bytes` are what the artefact's constants point into; they are kept.
  Model(Artefact artefact, std::shared_ptr<const void> bytes);

  const std::vector<ModelValue>& inputs() const { return inputs_; }
  const std::vector<ModelValue>& outputs() const { return outputs_; }

  // The plan for inputs of these dtypes, sizes and strides. Raises BadInput, which names the input, or the layer that refuses it.
  std::shared_ptr<const Plan> plan(const octet_tensor* inputs);

  // Runs a plan of `plan`; false as Plan::run. Raises BadInput where an index names no row.
  bool run(const Plan& plan, const void* const* inputs, void* const* outputs) const;

  std::atomic<int32_t> threads{0};  // 0 for as many as there are

 private:
  struct Entry {
    std::vector<PlanTensor> inputs;
    std::shared_ptr<const Plan> plan;
    std::atomic<uint64_t> used;
  };

  void check(const octet_tensor& input, const ModelValue& expected) const;
  std::shared_ptr<const Plan> find(const octet_tensor* inputs);
  std::shared_ptr<const Plan> build(const octet_tensor* inputs);
  std::string with_step(const std::string& error) const;

  const std::shared_ptr<const void> bytes_;
  std::vector<ModelValue> inputs_, outputs_;
  std::vector<std::string> steps_, lines_;  // the name of each operation, and its line without the settings
  std::optional<PreparedProgram> program_;
  std::optional<OwnWeights> weights_;
  std::shared_mutex mutex_;
  std::vector<std::unique_ptr<Entry>> entries_;
  int64_t bytes_of_plans_ = 0;
  std::atomic<uint64_t> clock_{0};
};

}  // namespace octet

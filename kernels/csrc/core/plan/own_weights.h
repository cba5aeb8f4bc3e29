// Weights that the core packs itself, for programs without torch.
#pragma once

#include <memory>
#include <vector>

#include "core/plan/prepared.h"

namespace octet {

// Packs each weight once for all plans that are built with it. Points to the constants, which have to outlive it and these plans. Any
// number of threads may share one.
class OwnWeights final : public WeightPacker {
 public:
  explicit OwnWeights(const std::vector<PlanConstant>& constants);
  ~OwnWeights() override;
  std::shared_ptr<const PackedGemm> gemm(int constant, int64_t group, int64_t groups) override;
  std::shared_ptr<const PackedGemm> grouped(int constant, int scales) override;
  std::shared_ptr<const PackedDepthwise> depthwise(int constant) override;
  std::shared_ptr<const PackedWinograd> winograd(int constant) override;
  std::shared_ptr<const void> table(int constant) override;

 private:
  class Weight;
  std::vector<std::unique_ptr<Weight>> weights_;
  std::vector<const void*> constants_;
};

}  // namespace octet

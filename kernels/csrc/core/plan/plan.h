// A planned run: the operations of a captured int8 region with every shape, address and packed weight decided beforehand.
// A plan belongs to one text, its constants and the shapes of its inputs. It never changes, so any number of threads run
// it at once, each in its own arena; a run allocates nothing. No tensors here.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/conv/conv.h"
#include "core/gemm/packed_gemm.h"
#include "core/plan/text.h"

namespace octet {

// A constant of the text. Everything that a plan needs of it is copied or packed when the plan is built.
struct PlanConstant {
  const void* data;   // contiguous
  std::string dtype;  // "int8", "uint8", "int32" or "float32"
  std::vector<int64_t> sizes;
  // The packed form of group `group` of `groups` of a convolution's weight; of a linear layer's, with groups = 0.
  std::function<std::shared_ptr<const PackedGemm>(int64_t group, int64_t groups)> pack;
  std::function<std::shared_ptr<const PackedDepthwise>()> pack_depthwise;
  std::function<std::shared_ptr<const PackedWinograd>()> pack_winograd;  // null where the backend has none
};

struct PlanTensor {
  std::vector<int64_t> sizes, strides;  // strides in elements
  bool real;                            // float32, else uint8
};

// Where a run's buffers are: the arena's, the inputs' and the outputs'; and what it met.
struct PlanFrame {
  uint8_t* const* buffers;
  std::atomic<bool>* finite;

  // What a row that was quantised says of itself. Threads only ever write false.
  void met(bool all_finite) const {
    if (!all_finite) finite->store(false, std::memory_order_relaxed);
  }
};

// One operation, with all it needs to know but where the buffers are.
struct PlanStep {
  std::function<void(const PlanFrame&)> run;
  std::vector<int> reads;
  int write;
  int over = -1;  // a buffer that is read place by place just before `write` is written there: one memory may serve both
};

class Plan {
 public:
  // Raises std::invalid_argument, which names the line, where the text does not fit the constants or the shapes.
  static std::unique_ptr<const Plan> build(const PlanText& text, const std::vector<PlanConstant>& constants,
                                           const std::vector<PlanTensor>& inputs);

  const std::vector<PlanTensor>& outputs() const { return outputs_; }
  // False where a value that was quantised is NaN or inf, which no integer says: then the outputs mean nothing.
  bool run(const void* const* inputs, void* const* outputs) const;

 private:
  friend class PlanBuilder;
  enum class Home { kArena, kInput, kOutput };
  struct Buffer {
    int64_t bytes;
    Home home;
    int64_t place;  // bytes from the arena's start, or the index of the input or output
  };

  std::vector<PlanStep> steps_;
  std::vector<Buffer> buffers_;
  std::vector<PlanTensor> outputs_;
  int64_t arena_bytes_ = 0;
};

}  // namespace octet

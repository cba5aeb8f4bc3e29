// A planned run: the operations of a captured int8 region with every shape, address and packed weight decided beforehand.
// A plan belongs to a prepared program (prepared.h) and the shapes of its inputs. It never changes, so any number of threads run
// it at once, each in its own arena; a run allocates nothing. No tensors here.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/conv/conv.h"
#include "core/gemm/packed_gemm.h"

namespace octet {

using Sizes = std::vector<int64_t>;

// A constant of a program: what needs its values copies them.
struct PlanConstant {
  const void* data;   // contiguous
  std::string dtype;  // "int8", "uint8", "int32" or "float32"
  Sizes sizes;
};

// The packed forms of the constants that are weights, by their index. Plans keep what they are given.
class WeightPacker {
 public:
  virtual ~WeightPacker() = default;
  // Of group `group` of `groups` of a convolution's weight; of a linear layer's, with groups = 0.
  virtual std::shared_ptr<const PackedGemm> gemm(int constant, int64_t group, int64_t groups) = 0;
  virtual std::shared_ptr<const PackedDepthwise> depthwise(int constant) = 0;
  virtual std::shared_ptr<const PackedWinograd> winograd(int constant) = 0;  // null where the backend has none
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

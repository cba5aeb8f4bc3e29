// A plan: the operations of a region with all shapes, addresses and packed weights decided.
// A plan belongs to a prepared program (prepared.h) and the shapes of its inputs. It is immutable, so any number of threads can
// run it at once, each in its own arena; a run allocates nothing. There are no tensors here.
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

// A constant of a program; users of its values copy them.
struct PlanConstant {
  const void* data;   // contiguous
  std::string dtype;  // "int8", "uint8", "int32", "float32"; "float16" of scales by group alone
  Sizes sizes;
};

// The packed forms of the constants that are weights, by index. Plans keep the forms that they get.
class WeightPacker {
 public:
  virtual ~WeightPacker() = default;
  // Of group `group` of `groups` of a convolution's weight; of a linear layer's, with groups = 0.
  virtual std::shared_ptr<const PackedGemm> gemm(int constant, int64_t group, int64_t groups) = 0;
  // Of a linear layer's weight of few bits whose scales, another constant, are by group: a GroupedGemm.
  virtual std::shared_ptr<const PackedGemm> grouped(int constant, int scales) = 0;
  virtual std::shared_ptr<const PackedDepthwise> depthwise(int constant) = 0;
  virtual std::shared_ptr<const PackedWinograd> winograd(int constant) = 0;  // null where the backend has none
  // The values of a table, as they lie; they may live no longer than the constants of a call do.
  virtual std::shared_ptr<const void> table(int constant) = 0;
};

struct PlanTensor {
  std::vector<int64_t> sizes, strides;  // strides in elements
  bool real;                            // float32, else uint8
  bool index = false;                   // int64, which look-ups alone read; not real
};

// The buffers of a run: the arena's, the inputs' and the outputs'; and whether all values were finite.
struct PlanFrame {
  uint8_t* const* buffers;
  std::atomic<bool>* finite;

  // Notes whether a quantised row was finite. Threads only ever write false.
  void met(bool all_finite) const {
    if (!all_finite) finite->store(false, std::memory_order_relaxed);
  }
};

// One operation, with all its settings except the addresses of buffers.
struct PlanStep {
  std::function<void(const PlanFrame&)> run;
  std::vector<int> reads;
  int write;
  int over = -1;  // a buffer that is read place by place just before `write` is written there: one memory may serve both
  int operation = -1;  // of the program, by its index; negative where it is of none
};

class Plan {
 public:
  const std::vector<PlanTensor>& outputs() const { return outputs_; }
  // About what it holds in memory beside packed weights and what is the program's: for who keeps plans to know how many. A step
  // counts for what it holds in the mean; tables that grow with the sizes of a call are counted as they are.
  int64_t bytes() const { return kStepBytes * static_cast<int64_t>(1 + steps_.size()) + table_bytes_; }
  // False where a quantised value was NaN or inf, which no integer represents: then the outputs are not valid.
  bool run(const void* const* inputs, void* const* outputs) const;
  // As `run`; adds the nanoseconds of each operation, by its index in the program. One that another's step computes has none.
  bool run_timed(const void* const* inputs, void* const* outputs, std::vector<int64_t>& nanoseconds) const;

 private:
  friend class PlanBuilder;
  static constexpr int64_t kStepBytes = 1 << 10;
  enum class Home { kArena, kInput, kOutput, kConstant };
  struct Buffer {
    int64_t bytes;
    Home home;
    int64_t place;  // bytes from the arena's start, or the index of the input, output or constant
  };

  // The addresses of all buffers in this thread's arena.
  uint8_t* const* place(const void* const* inputs, void* const* outputs) const;

  std::vector<PlanStep> steps_;
  std::vector<Buffer> buffers_;
  std::vector<PlanTensor> outputs_;
  std::vector<std::shared_ptr<const std::vector<float>>> constants_;
  int64_t arena_bytes_ = 0, table_bytes_ = 0;
};

}  // namespace octet

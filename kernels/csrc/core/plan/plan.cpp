#include "core/cpu/of_thread.h"
#include "core/plan/plan.h"

#include <chrono>

#include "core/gemm/workspace.h"

namespace octet {
namespace {

struct Arena {
  Scratch<uint8_t> bytes;
  std::vector<uint8_t*> buffers;
};

Arena& arena() {
  thread_local Arena* own = nullptr;
  return of_thread(own);
}

}  // namespace

uint8_t* const* Plan::place(const void* const* inputs, void* const* outputs) const {
  Arena& space = arena();
  uint8_t* const base = space.bytes.get(arena_bytes_);
  space.buffers.resize(buffers_.size());
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& buffer = buffers_[i];
    if (buffer.home == Home::kArena) space.buffers[i] = base + buffer.place;
    // Inputs and constants are only read: no step has one as its `write`.
    if (buffer.home == Home::kConstant)
      space.buffers[i] = const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(constants_[buffer.place]->data()));
    if (buffer.home == Home::kInput)
      space.buffers[i] = const_cast<uint8_t*>(static_cast<const uint8_t*>(inputs[buffer.place]));
    if (buffer.home == Home::kOutput) space.buffers[i] = static_cast<uint8_t*>(outputs[buffer.place]);
  }
  return space.buffers.data();
}

bool Plan::run(const void* const* inputs, void* const* outputs) const {
  std::atomic<bool> finite{true};
  const PlanFrame frame{place(inputs, outputs), &finite};
  for (const PlanStep& step : steps_) step.run(frame);
  return finite.load(std::memory_order_relaxed);
}

bool Plan::run_timed(const void* const* inputs, void* const* outputs, std::vector<int64_t>& nanoseconds) const {
  using Clock = std::chrono::steady_clock;
  std::atomic<bool> finite{true};
  const PlanFrame frame{place(inputs, outputs), &finite};
  Clock::time_point begin = Clock::now();
  for (const PlanStep& step : steps_) {
    step.run(frame);
    const Clock::time_point end = Clock::now();
    if (step.operation >= 0)
      nanoseconds[step.operation] += std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
    begin = end;
  }
  return finite.load(std::memory_order_relaxed);
}

}  // namespace octet

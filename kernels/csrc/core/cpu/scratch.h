// Memory of a thread that only grows, with room around it for kernels that read a little past their rows.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "core/cpu/memory.h"

namespace octet {

// Bytes that may be read before the first and after the last row of an activation matrix: QNNPACK's kernels load 8 bytes
// that end at the row's end (so start before it where K < 8), ours load 4 past it.
constexpr int64_t kSlack = 64;

// Bytes of a row of `k` quantised activations, rounded up so that every row starts aligned.
inline int64_t padded_row(int64_t k) { return (k + 63) / 64 * 64; }

// A buffer that only ever grows, with kSlack readable bytes on either side.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  T* get(int64_t count) {
    const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + 2 * kSlack + 63) / 64 * 64;
    if (bytes > bytes_) {
      std::free(memory_);
      // Zeros from the system, which writes none before they are read.
      memory_ = std::calloc(bytes + 63, 1);
      bytes_ = memory_ ? bytes : 0;
      if (!memory_) throw_no_memory(bytes, "intermediate values");
    }
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_) + 63) / 64 * 64 + kSlack);
  }

 private:
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace octet

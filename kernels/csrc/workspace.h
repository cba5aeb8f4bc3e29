// What whole layers share: buffers of the calling thread, and how static sums leave.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#include "linear.h"
#include "native.h"
#include "threads.h"

namespace octet {

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
      memory_ = std::aligned_alloc(64, bytes);
      bytes_ = memory_ ? bytes : 0;
      if (!memory_) throw std::bad_alloc();
      for (int64_t i = 0; i < bytes; ++i) static_cast<char*>(memory_)[i] = 0;
    }
    return reinterpret_cast<T*>(static_cast<char*>(memory_) + kSlack);
  }

 private:
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

struct Workspace {
  Scratch<uint8_t> q, q_low, unsummed;
  Scratch<int32_t> sums, sums_low;
  Scratch<RowRange> ranges;
  Scratch<float> hidden;
  // What requantises a channel, and the same in the order of a depthwise kernel.
  Scratch<int32_t> offset, arranged_offset;
  Scratch<float> multiplier, arranged_multiplier;
  // Of a convolution: its padded input, and where the rows of the product begin in it, as those of a pool's window do; of a
  // depthwise one, the rows that its kernel sees.
  Scratch<uint8_t> padded, placed;
  Scratch<const uint8_t*> begins;
  // Of Winograd's algorithm: its tiles, their matrices, and a pixel of padding.
  Scratch<WinogradTile> tiles;
  Scratch<uint8_t> winograd, border;
};

// The calling thread's buffers. Two levels, because an LSTM's projection runs inside its step.
Workspace& workspace(int level = 0);

// The range of one row of x * columns (columns may be null), for integers [0, top].
RowRange range_of(const float* x, const float* columns, int64_t k, int top);

// The linear layer of m rows at once; `shared` is the range of all of them, or null for one per row.
void linear_rows(const Linear& layer, const RowRange* shared, const float* x, int64_t ldx, int64_t m, float* y,
                 int64_t threads, Workspace& space);

// Sums of output row `index` (n values) to where `output` wants them: zero point removed, bias added, scaled.
void finish_row(const StaticOutput& output, int32_t* sums, int64_t index, int64_t n, int32_t zero_point,
                const int32_t* row_sums, const int32_t* bias);

// Writes the outputs [first, first + count) of a layer with a residual: `own` with it added.
void add_residual(const StaticOutput& output, const uint8_t* own, int64_t first, int64_t count);

// How `output` requantises raw sums, in arrays of the calling thread's workspace that hold until its next call.
Requantize requantize_of(const StaticOutput& output, int64_t n, int32_t zero_point, const int32_t* row_sums,
                         const int32_t* bias);

}  // namespace octet

#include "core/cpu/of_thread.h"
#include "core/depthwise/float_depthwise.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/cpu/scratch.h"
#include "core/cpu/threads.h"
#include "core/rows/reals.h"

namespace octet {
namespace {

constexpr int64_t kProductsPerThread = 1 << 18;

// A side of an image with its padding, dealt out by the remainder of the stride: a tap then meets neighbouring places of one part
// for neighbouring outputs.
struct Dealt {
  const FloatDepthwiseSide& side;
  int64_t parts = std::min(side.stride, side.reach() + 1);     // that a tap meets
  int64_t length = side.out() + side.reach() / side.stride;  // of a part

  // The places of a part that hold values, [first, last), and the value at the first.
  struct Filled {
    int64_t first, last, from;
  };
  Filled filled(int64_t part) const {
    const int64_t before = std::max<int64_t>(0, side.padding - part), first = (before + side.stride - 1) / side.stride;
    const int64_t from = first * side.stride + part - side.padding;
    const int64_t there = from < side.size ? (side.size - 1 - from) / side.stride + 1 : 0;
    return {first, std::max(first, std::min(length, first + there)), from};
  }
};

// A plane with its padding, part by part, in memory whose padding is zero and stays so.
class Padded {
 public:
  Padded(const Dealt& rows, const Dealt& columns)
      : rows_(rows), columns_(columns), part_(rows.length * columns.length), whole_(rows.parts * columns.parts * part_) {}

  int64_t room() const { return whole_ + kTapRoom; }

  // Where the first output meets each tap.
  std::vector<int64_t> offsets() const {
    std::vector<int64_t> offsets;
    for (int64_t y = 0; y < rows_.side.kernel; ++y)
      for (int64_t x = 0; x < columns_.side.kernel; ++x) {
        const int64_t row = y * rows_.side.dilation, column = x * columns_.side.dilation;
        const int64_t part = row % rows_.side.stride * columns_.parts + column % columns_.side.stride;
        offsets.push_back(part * part_ + row / rows_.side.stride * columns_.length + column / columns_.side.stride);
      }
    return offsets;
  }

  void fill(const float* plane, float* memory) const {
    for (int64_t down = 0; down < rows_.parts; ++down) {
      const Dealt::Filled rows = rows_.filled(down);
      for (int64_t along = 0; along < columns_.parts; ++along) {
        const Dealt::Filled columns = columns_.filled(along);
        float* to = memory + (down * columns_.parts + along) * part_ + rows.first * columns_.length + columns.first;
        const float* from = plane + rows.from * columns_.side.size + columns.from;
        for (int64_t row = rows.first; row < rows.last; ++row) {
          copy(from, columns.last - columns.first, to);
          to += columns_.length;
          from += rows_.side.stride * columns_.side.size;
        }
      }
    }
  }

 private:
  void copy(const float* from, int64_t n, float* to) const {
    const int64_t stride = columns_.side.stride;
    if (stride == 1) {
      std::memcpy(to, from, n * sizeof(float));
    } else if (stride == 2) {
      real_kernels().every_second(from, n, to);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
    }
  }

  const Dealt &rows_, &columns_;
  int64_t part_, whole_;
};

}  // namespace

void float_depthwise(const FloatDepthwiseSide& height, const FloatDepthwiseSide& width, int64_t planes, int64_t channels,
                     const float* x, const float* weight, const float* bias, float* out) {
  const Dealt rows{height}, columns{width};
  const Padded padded(rows, columns);
  const std::vector<int64_t> offsets = padded.offsets();
  const int64_t taps = static_cast<int64_t>(offsets.size()), rows_out = height.out(), columns_out = width.out();
  const int64_t n = rows_out * columns.length;  // of the sums of a plane, with those between its rows
  const int64_t products = std::max<int64_t>(1, n * taps);
  each_range(planes, std::max<int64_t>(1, kProductsPerThread / products), [&](int64_t begin, int64_t end) {
    thread_local Scratch<float>* own = nullptr;
    float* const memory = of_thread(own).get(padded.room() + n + kTapRoom);
    float* const sums = memory + padded.room();
    std::fill_n(memory, padded.room(), 0.0f);
    for (int64_t plane = begin; plane < end; ++plane) {
      const int64_t channel = plane % channels;
      padded.fill(x + plane * height.size * width.size, memory);
      real_kernels().sum_taps(memory, offsets.data(), weight + channel * taps, taps, bias ? bias[channel] : 0.0f, n, sums);
      float* const to = out + plane * rows_out * columns_out;
      for (int64_t row = 0; row < rows_out; ++row)
        std::memcpy(to + row * columns_out, sums + row * columns.length, columns_out * sizeof(float));
    }
  });
}

}  // namespace octet

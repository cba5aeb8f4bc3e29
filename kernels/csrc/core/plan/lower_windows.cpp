// Pooling and means: over windows of the spatial dimensions, or over whole dimensions.
#include <algorithm>

#include "core/cpu/of_thread.h"
#include "core/gemm/workspace.h"
#include "core/plan/lower.h"
#include "core/rows/elementwise.h"

namespace octet {
namespace {

// Along one axis, for every output: the inputs [begin, end) by `step`, and how many count as read where padding does.
struct Windows {
  Sizes begin, end, counted;
  int64_t step = 1;

  int64_t count() const { return static_cast<int64_t>(begin.size()); }
  int64_t reads(int64_t i) const { return std::max<int64_t>(0, (end[i] - begin[i] + step - 1) / step); }
};

struct Pooling {
  Windows axes[3];  // depth, height, width; what is missing in front has one window of one
  bool largest;
  bool count_padding = false;
  int64_t divisor = 0;  // 0: what the window holds
  MeanSettings settings{};
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// The windows along one axis: how many, which is checked before they are made, for a text may ask for any number.
struct Along {
  int64_t count;
  std::function<Windows()> make;
};

// torch's windows (pooling_output_shape): with ceil_mode the last one may hang over the end, but starts inside.
Along sliding(const Operation& operation, int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation,
              bool ceil_mode) {
  expect(operation, padding <= kernel / 2, "its padding is more than half its window");
  const int64_t span = dilation * (kernel - 1) + 1;
  int64_t outputs = floor_div(size + 2 * padding - span + (ceil_mode ? stride - 1 : 0), stride) + 1;
  if (ceil_mode && (outputs - 1) * stride >= size + padding) --outputs;
  expect(operation, outputs >= 1, "its window does not fit the input");
  return {outputs, [=] {
            Windows windows;
            windows.step = dilation;
            for (int64_t i = 0; i < outputs; ++i) {
              const int64_t begin = i * stride - padding, end = std::min(begin + span, size + padding);
              windows.counted.push_back(end - begin);
              windows.begin.push_back(begin < 0 ? begin + (dilation - 1 - begin) / dilation * dilation : begin);
              windows.end.push_back(std::min(end, size));
            }
            return windows;
          }};
}

Along tiling(int64_t size, int64_t outputs) {
  return {outputs, [=] {
            Windows windows;
            for (int64_t i = 0; i < outputs; ++i) {
              windows.begin.push_back(i * size / outputs);
              windows.end.push_back(((i + 1) * size + outputs - 1) / outputs);
              windows.counted.push_back(windows.end.back() - windows.begin.back());
            }
            return windows;
          }};
}

Windows whole() {
  Windows windows;
  windows.begin = {0}, windows.end = {1}, windows.counted = {1};
  return windows;
}

// The largest of the windows of lines [first, first + count), a line being all outputs that differ in width alone.
void max_lines(const Pooling& pool, const uint8_t* x, const int64_t (&strides)[3], int64_t batch_stride, int64_t channels,
               int64_t first, int64_t count, uint8_t* out) {
  const Windows &depth = pool.axes[0], &height = pool.axes[1], &width = pool.axes[2];
  for (int64_t line = first; line < first + count; ++line) {
    const int64_t h = line % height.count(), d = line / height.count() % depth.count();
    const uint8_t* sample = x + line / height.count() / depth.count() * batch_stride;
    thread_local Scratch<const uint8_t*>* own = nullptr;
    const uint8_t** const rows = of_thread(own).get(depth.reads(d) * height.reads(h));
    int64_t there = 0;
    for (int64_t i = depth.begin[d]; i < depth.end[d]; i += depth.step)
      for (int64_t j = height.begin[h]; j < height.end[h]; j += height.step)
        rows[there++] = sample + i * strides[0] + j * strides[1];
    element_kernels().max_windows(rows, there, width.begin.data(), width.end.data(), width.step, width.count(), channels,
                                  out + line * width.count() * channels);
  }
}

// The means of pixels [first, first + count): channels are innermost, so a window is a few rows of them.
void mean_pixels(const Pooling& pool, const uint8_t* x, const int64_t (&strides)[3], int64_t batch_stride, int64_t channels,
                 int64_t first, int64_t count, uint8_t* out) {
  const ElementKernels& kernels = element_kernels();
  int32_t* sums = workspace().sums.get(channels);
  const Windows &depth = pool.axes[0], &height = pool.axes[1], &width = pool.axes[2];
  for (int64_t pixel = first; pixel < first + count; ++pixel) {
    int64_t rest = pixel;
    const int64_t w = rest % width.count();
    rest /= width.count();
    const int64_t h = rest % height.count();
    rest /= height.count();
    const int64_t d = rest % depth.count();
    const uint8_t* sample = x + rest / depth.count() * batch_stride;
    uint8_t* to = out + pixel * channels;
    std::fill_n(sums, channels, 0);
    for (int64_t i = depth.begin[d]; i < depth.end[d]; i += depth.step)
      for (int64_t j = height.begin[h]; j < height.end[h]; j += height.step)
        for (int64_t k = width.begin[w]; k < width.end[w]; k += width.step)
          kernels.sum_into(sample + i * strides[0] + j * strides[1] + k * strides[2], channels, sums);
    const int64_t read = depth.reads(d) * height.reads(h) * width.reads(w);
    int64_t divisor = pool.count_padding ? depth.counted[d] * height.counted[h] * width.counted[w] : read;
    if (pool.divisor) divisor = pool.divisor;
    kernels.mean(pool.settings, sums, static_cast<int32_t>(read), static_cast<int32_t>(divisor), channels, to);
  }
}

// `q` with a batch dimension in front where it has none.
PlanView batched(const Operation& operation, const PlanView& q, int64_t dims) {
  expect_dtype(operation, q, false);
  expect_or(operation, q.rank() == dims + 2 || q.rank() == dims + 1, [&] {
    return "its input has " + std::to_string(q.rank()) + " dimensions, expected " + std::to_string(dims + 2);
  });
  if (q.rank() == dims + 2) return q;
  PlanView made = q;
  made.sizes.insert(made.sizes.begin(), 1);
  made.strides.insert(made.strides.begin(), 1);
  return made;
}

PlanView pooled(PlanBuilder& b, const Operation& operation, Value q, size_t window,
                const std::function<Along(int64_t, int64_t)>& along, Pooling pool) {
  const int64_t dims = static_cast<int64_t>(window);
  expect_or(operation, dims >= 1 && dims <= 3,
            [&] { return "its window has " + std::to_string(dims) + " dimensions, expected 1 to 3"; });
  const PlanView given = b.input(q);
  const PlanView x = b.channels_last(batched(operation, given, dims));
  expect(operation, std::find(x.sizes.begin() + 1, x.sizes.end(), 0) == x.sizes.end(), "its input is empty");
  Sizes sizes{x.sizes[0], x.sizes[1]};
  std::vector<Along> axes;
  for (int64_t d = 0; d < dims; ++d) {
    axes.push_back(along(d, x.sizes[d + 2]));
    sizes.push_back(axes.back().count);
  }
  checked_count(operation, sizes);
  int64_t strides[3] = {0, 0, 0}, pixels = x.sizes[0], taps = 1;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t d = axis - (3 - dims);
    pool.axes[axis] = d < 0 ? whole() : axes[d].make();
    if (d >= 0) strides[axis] = x.strides[d + 2];
    pixels *= pool.axes[axis].count();
    int64_t most = 0;
    for (int64_t i = 0; i < pool.axes[axis].count(); ++i) most = std::max(most, pool.axes[axis].reads(i));
    taps *= most;
    b.hold_table(pool.axes[axis].begin.size(), 3 * sizeof(int64_t));
  }
  expect(operation, taps < (1 << 23), "its window holds more than 2**23 values");
  PlanView out = b.fresh(sizes, channels_last_strides(sizes));
  const int64_t channels = x.sizes[1], batch_stride = x.strides[0];
  const auto shared = std::make_shared<const Pooling>(std::move(pool));
  const auto part = shared->largest ? &max_lines : &mean_pixels;
  const int64_t lines = x.sizes[0] * shared->axes[0].count() * shared->axes[1].count(), parts = shared->largest ? lines : pixels;
  b.emit({&x}, out, [=](const PlanFrame& frame) {
    each_part(parts, pixels * taps * channels, [&](int64_t first, int64_t count) {
      part(*shared, x.bytes(frame), strides, batch_stride, channels, first, count, out.bytes_out(frame));
    });
  });
  if (given.rank() == dims + 1) out.sizes.erase(out.sizes.begin()), out.strides.erase(out.strides.begin());
  return out;
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::MaxPool& pool) {
  Pooling how;
  how.largest = true;
  const auto along = [&](int64_t d, int64_t size) {
    return sliding(operation, size, pool.kernel[d], pool.stride[d], pool.padding[d], pool.dilation[d], pool.ceil_mode);
  };
  return pooled(b, operation, pool.q, pool.kernel.size(), along, std::move(how));
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::AvgPool& pool) {
  Pooling how;
  how.largest = false;
  how.count_padding = pool.count_padding;
  how.divisor = pool.divisor;
  how.settings = pool.by;
  const auto along = [&](int64_t d, int64_t size) {
    // torch's rule for volumes alone, whatever their padding (pool3d_shape_check).
    expect(operation, pool.kernel.size() < 3 || size >= pool.kernel[d], "its window is larger than the input");
    return sliding(operation, size, pool.kernel[d], pool.stride[d], pool.padding[d], 1, pool.ceil_mode);
  };
  return pooled(b, operation, pool.q, pool.kernel.size(), along, std::move(how));
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::AdaptivePool& pool) {
  Pooling how;
  how.largest = pool.largest;
  how.settings = pool.by;
  const auto along = [&](int64_t d, int64_t size) { return tiling(size, pool.size[d] < 0 ? size : pool.size[d]); };
  return pooled(b, operation, pool.q, pool.size.size(), along, std::move(how));
}

// Over whole dimensions: those are moved to the back, where each output is the sum of one row; over all spatial
// dimensions of a channels last tensor it is the sum of whole pixels.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::Mean& mean) {
  const PlanView x = b.input(mean.q);
  expect_dtype(operation, x, false);
  std::vector<bool> reduced(x.sizes.size(), false);
  for (const int64_t dim : mean.dims) {
    const int64_t d = dimension(operation, dim, x.rank());
    expect(operation, !reduced[d], "takes a dimension twice");
    reduced[d] = true;
  }
  PlanView moved = x;
  Sizes kept, shape;
  moved.sizes.clear(), moved.strides.clear();
  int64_t count = 1;
  for (const bool back : {false, true})
    for (size_t d = 0; d < reduced.size(); ++d) {
      if (reduced[d] != back) continue;
      moved.sizes.push_back(x.sizes[d]), moved.strides.push_back(x.strides[d]);
      if (back)
        count *= x.sizes[d];
      else
        kept.push_back(x.sizes[d]);
    }
  for (size_t d = 0; d < reduced.size(); ++d)
    if (!reduced[d] || mean.keepdim) shape.push_back(reduced[d] ? 1 : x.sizes[d]);
  expect_or(operation, count > 0 && count < (1 << 23), [&] { return "its mean is over " + std::to_string(count) + " values"; });
  const MeanSettings settings = mean.by;
  PlanView out = b.fresh(kept, plain_strides(kept));
  bool spatial = x.rank() >= 3 && !reduced[0] && !reduced[1] && x.has_strides(channels_last_strides(x.sizes));
  for (size_t d = 2; d < reduced.size(); ++d) spatial &= reduced[d];
  if (spatial) {
    const int64_t channels = x.sizes[1], batch = x.sizes[0];
    b.emit({&x}, out, [=](const PlanFrame& frame) {
      each_part(batch, x.count(), [&](int64_t first, int64_t samples) {
        int32_t* sums = workspace().sums.get(channels);
        for (int64_t n = first; n < first + samples; ++n) {
          std::fill_n(sums, channels, 0);
          const uint8_t* sample = x.bytes(frame) + n * count * channels;
          for (int64_t i = 0; i < count; ++i) element_kernels().sum_into(sample + i * channels, channels, sums);
          element_kernels().mean(settings, sums, static_cast<int32_t>(count), static_cast<int32_t>(count), channels,
                                 out.bytes_out(frame) + n * channels);
        }
      });
    });
  } else {
    const PlanView rows = b.plain(moved);
    b.emit({&rows}, out, [=, outputs = product(kept)](const PlanFrame& frame) {
      each_part(outputs, outputs * count, [&](int64_t first, int64_t outs) {
        int32_t* sums = workspace().sums.get(outs);
        for (int64_t i = 0; i < outs; ++i) sums[i] = element_kernels().sum(rows.bytes(frame) + (first + i) * count, count);
        element_kernels().mean(settings, sums, static_cast<int32_t>(count), static_cast<int32_t>(count), outs,
                               out.bytes_out(frame) + first);
      });
    });
  }
  out.sizes = shape;
  out.strides = plain_strides(shape);
  return out;
}

}  // namespace octet

// Pooling and means: over windows of the spatial dimensions, or over whole dimensions.
#include <algorithm>

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

// One setting per spatial dimension, from a list, a single number for all, or `fallback` where there is none.
Sizes settings_of(const PlanLine& line, std::string_view name, int64_t dims, const Sizes& fallback) {
  if (!line.has(name)) return fallback;
  Sizes given = line.integers(name);
  if (given.size() == 1) given.resize(dims, given[0]);
  expect(line, static_cast<int64_t>(given.size()) == dims, std::string(name) + " has another number of dimensions");
  return given;
}

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// torch's windows (pooling_output_shape): with ceil_mode the last one may hang over the end, but starts inside.
Windows sliding(const PlanLine& line, int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation,
                bool ceil_mode) {
  expect(line, padding <= kernel / 2, "its padding is more than half its window");
  const int64_t span = dilation * (kernel - 1) + 1;
  int64_t outputs = floor_div(size + 2 * padding - span + (ceil_mode ? stride - 1 : 0), stride) + 1;
  if (ceil_mode && (outputs - 1) * stride >= size + padding) --outputs;
  expect(line, outputs >= 1, "its window does not fit the input");
  Windows windows;
  windows.step = dilation;
  for (int64_t i = 0; i < outputs; ++i) {
    int64_t begin = i * stride - padding;
    const int64_t end = std::min(begin + span, size + padding);
    windows.counted.push_back(end - begin);
    while (begin < 0) begin += dilation;
    windows.begin.push_back(begin);
    windows.end.push_back(std::min(end, size));
  }
  return windows;
}

Windows tiling(int64_t size, int64_t outputs) {
  Windows windows;
  for (int64_t i = 0; i < outputs; ++i) {
    windows.begin.push_back(i * size / outputs);
    windows.end.push_back(((i + 1) * size + outputs - 1) / outputs);
    windows.counted.push_back(windows.end.back() - windows.begin.back());
  }
  return windows;
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
    thread_local Scratch<const uint8_t*> begins;
    const uint8_t** const rows = begins.get(depth.reads(d) * height.reads(h));
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
PlanView batched(const PlanLine& line, const PlanView& q, int64_t dims) {
  expect_dtype(line, q, false);
  expect(line, q.rank() == dims + 2 || q.rank() == dims + 1,
         "its input has " + std::to_string(q.rank()) + " dimensions, expected " + std::to_string(dims + 2));
  if (q.rank() == dims + 2) return q;
  PlanView made = q;
  made.sizes.insert(made.sizes.begin(), 1);
  made.strides.insert(made.strides.begin(), 1);
  return made;
}

PlanView pooled(PlanBuilder& b, const PlanLine& line, int64_t dims, const std::function<Windows(int64_t, int64_t)>& along,
                Pooling pool) {
  expect(line, dims >= 1 && dims <= 3, "its window has " + std::to_string(dims) + " dimensions, expected 1 to 3");
  const PlanView given = b.input(line, "q");
  const PlanView x = b.channels_last(batched(line, given, dims));
  expect(line, std::find(x.sizes.begin() + 1, x.sizes.end(), 0) == x.sizes.end(), "its input is empty");
  Sizes sizes{x.sizes[0], x.sizes[1]};
  int64_t strides[3] = {0, 0, 0}, pixels = x.sizes[0], taps = 1;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t d = axis - (3 - dims);
    pool.axes[axis] = d < 0 ? whole() : along(d, x.sizes[d + 2]);
    if (d >= 0) sizes.push_back(pool.axes[axis].count()), strides[axis] = x.strides[d + 2];
    pixels *= pool.axes[axis].count();
    int64_t most = 0;
    for (int64_t i = 0; i < pool.axes[axis].count(); ++i) most = std::max(most, pool.axes[axis].reads(i));
    taps *= most;
  }
  expect(line, taps < (1 << 23), "its window holds more than 2**23 values");
  checked_count(line, sizes);
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

MeanSettings mean_settings(const PlanLine& line) {
  return {byte(line, "zero_point"), static_cast<float>(line.number("multiplier")), byte(line, "output_zero_point")};
}

PlanView max_pool(PlanBuilder& b, const PlanLine& line) {
  const Sizes kernel = line.integers("kernel");
  const int64_t dims = static_cast<int64_t>(kernel.size());
  const Sizes stride = settings_of(line, "stride", dims, kernel), padding = settings_of(line, "padding", dims, Sizes(dims, 0)),
              dilation = settings_of(line, "dilation", dims, Sizes(dims, 1));
  Pooling pool;
  pool.largest = true;
  const auto along = [&](int64_t d, int64_t size) {
    return sliding(line, size, kernel[d], stride[d], padding[d], dilation[d], line.flag("ceil_mode"));
  };
  return pooled(b, line, dims, along, std::move(pool));
}

PlanView avg_pool(PlanBuilder& b, const PlanLine& line) {
  const Sizes kernel = line.integers("kernel");
  const int64_t dims = static_cast<int64_t>(kernel.size());
  const Sizes stride = settings_of(line, "stride", dims, kernel), padding = settings_of(line, "padding", dims, Sizes(dims, 0));
  Pooling pool;
  pool.largest = false;
  pool.count_padding = !line.has("count_include_pad") || line.flag("count_include_pad");
  expect(line, checked_count(line, kernel) < (1 << 23), "its window holds more than 2**23 values");
  expect(line, dims > 1 || !line.fields.contains("divisor_override"), "a window of one dimension has no divisor_override");
  pool.divisor = line.has("divisor_override") ? line.integer("divisor_override") : 0;
  pool.settings = mean_settings(line);
  const auto along = [&](int64_t d, int64_t size) {
    return sliding(line, size, kernel[d], stride[d], padding[d], 1, line.flag("ceil_mode"));
  };
  return pooled(b, line, dims, along, std::move(pool));
}

PlanView adaptive_pool(PlanBuilder& b, const PlanLine& line) {
  const std::vector<std::string> outputs = line.words("size");
  Pooling pool;
  pool.largest = line.op == "adaptive_max_pool";
  if (!pool.largest) pool.settings = mean_settings(line);
  const auto along = [&](int64_t d, int64_t size) {
    return tiling(size, outputs[d] == "-" ? size : parse_integer(line, outputs[d]));
  };
  return pooled(b, line, static_cast<int64_t>(outputs.size()), along, std::move(pool));
}

// Over whole dimensions: those are moved to the back, where each output is the sum of one row; over all spatial
// dimensions of a channels last tensor it is the sum of whole pixels.
PlanView mean(PlanBuilder& b, const PlanLine& line) {
  const PlanView x = b.input(line, "q");
  expect_dtype(line, x, false);
  std::vector<bool> reduced(x.sizes.size(), false);
  if (line.has("dim"))
    for (const int64_t dim : line.integers("dim")) {
      const int64_t d = dimension(line, dim, x.rank());
      expect(line, !reduced[d], "takes a dimension twice");
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
    if (!reduced[d] || line.flag("keepdim")) shape.push_back(reduced[d] ? 1 : x.sizes[d]);
  expect(line, count > 0 && count < (1 << 23), "its mean is over " + std::to_string(count) + " values");
  const MeanSettings settings = mean_settings(line);
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

}  // namespace

const PlanOperators& window_operators() {
  static const PlanOperators operators = {{"max_pool", &max_pool},
                                          {"avg_pool", &avg_pool},
                                          {"adaptive_avg_pool", &adaptive_pool},
                                          {"adaptive_max_pool", &adaptive_pool},
                                          {"mean", &mean}};
  return operators;
}

}  // namespace octet

// Resizing images: to the nearest value, or linearly between neighbours. kernels/reference_ops.py says in which order a linear
// resize rounds.
#include <algorithm>
#include <cmath>

#include "core/cpu/of_thread.h"
#include "core/cpu/scratch.h"
#include "core/gemm/workspace.h"
#include "core/plan/lower.h"
#include "core/rows/elementwise.h"

namespace octet {
namespace {

// The input's values per output, in float32 as torch has it (UpSample.h); `factor` 0 where sizes alone decide.
float scale_of(int64_t size, int64_t outputs, double factor) {
  return factor > 0 ? static_cast<float>(1.0 / factor) : static_cast<float>(size) / static_cast<float>(outputs);
}

// torch's nearest neighbours.
Sizes nearest(int64_t size, int64_t outputs, double factor, bool exact) {
  const float scale = scale_of(size, outputs, factor);
  Sizes sources(outputs);
  for (int64_t i = 0; i < outputs; ++i) {
    const float place = (static_cast<float>(i) + (exact ? 0.5f : 0.0f)) * scale;
    sources[i] = std::min(static_cast<int64_t>(std::floor(place)), size - 1);
  }
  return sources;
}

// The two neighbours of every output, and how much there is of each.
struct Neighbours {
  std::vector<int32_t> first, second;
  std::vector<float> of_first, of_second;
};

Neighbours neighbours(int64_t size, int64_t outputs, double factor, bool align_corners) {
  Neighbours found;
  const float scale = align_corners ? static_cast<float>(size - 1) / static_cast<float>(std::max<int64_t>(outputs - 1, 1))
                                    : scale_of(size, outputs, factor);
  for (int64_t i = 0; i < outputs; ++i) {
    float place = static_cast<float>(i);
    if (size != outputs) place = align_corners ? place * scale : std::max((place + 0.5f) * scale - 0.5f, 0.0f);
    const int64_t first = std::min(static_cast<int64_t>(std::floor(place)), size - 1);
    const float part = std::clamp(place - static_cast<float>(first), 0.0f, 1.0f);
    found.first.push_back(static_cast<int32_t>(first));
    found.second.push_back(static_cast<int32_t>(std::min(first + 1, size - 1)));
    found.of_first.push_back(1.0f - part);
    found.of_second.push_back(part);
  }
  return found;
}

// The same for every channel of a pixel as for pixels of one channel: vectors of few channels are mostly empty.
Neighbours of_values(const Neighbours& pixels, int64_t channels) {
  Neighbours found;
  for (size_t i = 0; i < pixels.first.size(); ++i)
    for (int64_t c = 0; c < channels; ++c) {
      found.first.push_back(static_cast<int32_t>(pixels.first[i] * channels + c));
      found.second.push_back(static_cast<int32_t>(pixels.second[i] * channels + c));
      found.of_first.push_back(pixels.of_first[i]);
      found.of_second.push_back(pixels.of_second[i]);
    }
  return found;
}

constexpr int64_t kManyChannels = 16;

struct Room {
  Scratch<float> row;
};

Room& room() {
  thread_local Room* own = nullptr;
  return of_thread(own);
}

// Between two lines of the input, and then between two pixels of the line that this gives.
PlanView blended(PlanBuilder& b, const PlanView& given, const Sizes& sizes, const std::vector<double>& factors,
                 const op::Interpolate& by) {
  const PlanView x = b.channels_last(given);
  const PlanView out = b.fresh(sizes, channels_last_strides(sizes));
  const bool flat = x.rank() == 3;
  const int64_t height = flat ? 1 : x.sizes[2], width = x.sizes.back(), lines = flat ? 1 : sizes[2], pixels = sizes.back();
  const int64_t channels = x.sizes[1], line = width * channels, out_line = pixels * channels;
  const auto rows = std::make_shared<const Neighbours>(neighbours(height, lines, factors[0], by.align_corners));
  const Neighbours columns = neighbours(width, pixels, factors.back(), by.align_corners);
  const bool many = channels >= kManyChannels;
  const auto places = std::make_shared<const Neighbours>(many ? columns : of_values(columns, channels));
  const auto settings = std::make_shared<const RescaleSettings>(by.by);
  b.hold_table(rows->first.size() + places->first.size(), 2 * (sizeof(int32_t) + sizeof(float)));
  b.emit({&x}, out, [=](const PlanFrame& frame) {
    const ElementKernels& kernels = element_kernels();
    each_part(x.sizes[0] * lines, out.count() * 8, [&](int64_t first, int64_t count) {
      float* const between = room().row.get(line);
      for (int64_t i = first; i < first + count; ++i) {
        const uint8_t* image = x.bytes(frame) + i / lines * height * line;
        const int64_t y = i % lines;
        kernels.blend_rows(image + rows->first[y] * line, image + rows->second[y] * line, settings->x_zero, rows->of_first[y],
                           rows->of_second[y], line, between);
        kernels.blend_pixels(between, places->first.data(), places->second.data(), places->of_first.data(),
                             places->of_second.data(), many ? pixels : out_line, many ? channels : 1, *settings,
                             out.bytes_out(frame) + i * out_line);
      }
    });
  });
  return out;
}

Sizes everything(int64_t size) {
  Sizes sources(size);
  for (int64_t i = 0; i < size; ++i) sources[i] = i;
  return sources;
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Interpolate& interpolate) {
  const PlanView x = b.input(interpolate.q);
  expect_dtype(operation, x, false);
  expect(operation, x.rank() >= 3 && x.rank() <= 5, "its input has no spatial dimensions, or more than three");
  const size_t dims = x.sizes.size() - 2;
  expect(operation, interpolate.dims == 0 || interpolate.dims == static_cast<int64_t>(dims),
         "its mode is for another number of dimensions");
  const bool sized = !interpolate.size.empty();
  Sizes wanted;
  for (const SizeParts& size : interpolate.size) wanted.push_back(number_of(b, operation, size));
  std::vector<double> factors = interpolate.factors;
  if (interpolate.one_for_all) sized ? wanted.resize(dims, wanted[0]) : factors.resize(dims, factors[0]);
  expect(operation, (sized ? wanted.size() : factors.size()) == dims, "its size has another number of dimensions");
  Sizes sizes{x.sizes[0], x.sizes[1]};
  for (size_t d = 0; d < dims; ++d) {
    const int64_t size = x.sizes[d + 2];
    const double scaled = sized ? static_cast<double>(wanted[d]) : std::floor(static_cast<double>(size) * factors[d]);
    expect(operation, scaled > 0 && size > 0 && x.sizes[1] > 0, "it would be empty");
    sizes.push_back(static_cast<int64_t>(std::min(scaled, 1e15)));
  }
  checked_count(operation, sizes);
  if (sized || interpolate.recompute) factors.assign(dims, 0.0);
  if (interpolate.mode == op::Resizing::kLinear) {
    expect(operation, x.count() <= INT32_MAX && product(sizes) <= INT32_MAX, "its images are too large");
    if (product(sizes) == 0) return b.fresh(sizes, channels_last_strides(sizes));
    return blended(b, x, sizes, factors, interpolate);
  }
  if (product(sizes) == 0) return b.fresh(sizes, plain_strides(sizes));
  std::vector<Sizes> sources{everything(x.sizes[0]), everything(x.sizes[1])};
  const bool exact = interpolate.mode == op::Resizing::kNearestExact;
  for (size_t d = 0; d < dims; ++d) {
    const int64_t size = x.sizes[d + 2], outputs = sizes[d + 2];
    // As torch does with images alone, whatever the factor was (nearest_idx in UpSample.h).
    const bool by_sizes = dims == 2 && !exact && (outputs == size || outputs == 2 * size);
    sources.push_back(nearest(size, outputs, by_sizes ? 0.0 : factors[d], exact));
  }
  // The same value for every integer, so requantising is a look-up.
  const uint8_t* const first = interpolate.by.table;
  const auto table = std::make_shared<const std::vector<uint8_t>>(first, first + 256);
  bool unchanged = true;
  for (int q = 0; q < 256; ++q) unchanged &= (*table)[q] == q;
  const PlanView rescaled = unchanged ? x : looked_up(b, x, table);
  return gathered(b, rescaled, sources, 0);
}

}  // namespace octet

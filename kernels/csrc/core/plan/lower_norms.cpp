// Norms over the channels and pixels of an image, and by the root mean square of a row. kernels/reference_reals.py says what they
// mean.
#include <algorithm>
#include <cmath>

#include "core/cpu/of_thread.h"
#include "core/cpu/scratch.h"
#include "core/gemm/workspace.h"
#include "core/plan/lower.h"
#include "core/rows/reals.h"

namespace octet {
namespace {

// Pixels whose sums are float32 before they are added up in float64.
constexpr int64_t kSummed = 256;

struct Room {
  Scratch<float> sums, mean, factor, shift;
  Scratch<double> totals;
};

Room& room() {
  thread_local Room* own = nullptr;
  return of_thread(own);
}

struct GroupNorm {
  int64_t pixels, channels, groups;
  std::shared_ptr<const std::vector<float>> weight, bias;
  float eps;

  // totals[i]: what add(x, pixels, sums) adds to sums[i], over all pixels, for `count` sums.
  template <class Add>
  const double* totals(const float* x, int64_t count, Add add) const {
    Room& space = room();
    double* const totals = space.totals.get(count);
    float* const sums = space.sums.get(count);
    std::fill_n(totals, count, 0.0);
    for (int64_t first = 0; first < pixels; first += kSummed) {
      std::fill_n(sums, count, 0.0f);
      add(x + first * channels, std::min(kSummed, pixels - first), sums);
      for (int64_t i = 0; i < count; ++i) totals[i] += sums[i];
    }
    return totals;
  }

  // The mean over a group of what was summed by channel.
  double mean_of(const double* totals, int64_t first, int64_t width) const {
    double total = 0.0;
    for (int64_t c = first; c < first + width; ++c) total += totals[c];
    return total / static_cast<double>(width * pixels);
  }

  // A float32 cannot hold the mean of values that are far from 0 and close together as finely as these lie. So the first pass
  // only finds a mean nearby; the second one finds what it is off by, which the shift takes in, with the squares around it.
  void sample(const float* x, float* out) const {
    const RealKernels& kernels = real_kernels();
    Room& space = room();
    float *const mean = space.mean.get(channels), *const factor = space.factor.get(channels);
    float* const shift = space.shift.get(channels);
    const int64_t width = channels / groups;
    const double* sums = totals(
        x, channels, [&](const float* some, int64_t n, float* to) { kernels.sum_channels(some, n, channels, to); });
    for (int64_t first = 0; first < channels; first += width)
      std::fill_n(mean + first, width, static_cast<float>(mean_of(sums, first, width)));
    sums = totals(x, 2 * channels, [&](const float* some, int64_t n, float* to) {
      kernels.sum_differences(some, n, channels, mean, to);
    });
    for (int64_t first = 0; first < channels; first += width) {
      const double off = mean_of(sums, first, width), spread = mean_of(sums + channels, first, width) - off * off;
      const float inverse = 1.0f / std::sqrt(static_cast<float>(spread < 0 ? 0.0 : spread) + eps);
      for (int64_t c = first; c < first + width; ++c) {
        factor[c] = weight ? inverse * (*weight)[c] : inverse;
        shift[c] = static_cast<float>((bias ? (*bias)[c] : 0.0f) - off * factor[c]);
      }
    }
    kernels.scale_channels(x, pixels, channels, mean, factor, shift, out);
  }
};

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::GroupNorm& by) {
  const PlanView x = b.channels_last(b.input(by.x));
  expect_dtype(operation, x, true);
  const bool each = by.groups == 0;
  expect(operation, x.rank() >= (each ? 3 : 2), each ? "its input has no pixels" : "its input has no channels");
  const int64_t channels = x.sizes[1], batch = x.sizes[0], groups = each ? channels : by.groups;
  expect(operation, channels > 0 && channels % groups == 0, "its groups do not fit");
  const int64_t pixels = product(Sizes(x.sizes.begin() + 2, x.sizes.end()));
  expect(operation, (each ? pixels : batch * pixels * (channels / groups)) != 1, "its groups have one value each");
  const GroupNorm norm{pixels, channels, groups, b.reals(operation, by.weight, "weight", channels),
                       b.reals(operation, by.bias, "bias", channels), by.eps};
  const PlanView out = b.fresh(x.sizes, channels_last_strides(x.sizes), true);
  b.emit({&x}, out, [=, count = x.count()](const PlanFrame& frame) {
    each_part(batch, count * 8, [&](int64_t first, int64_t samples) {
      for (int64_t i = first; i < first + samples; ++i)
        norm.sample(x.reals(frame) + i * pixels * channels, out.reals_out(frame) + i * pixels * channels);
    });
  });
  return out;
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::RmsNorm& by) {
  const PlanView x = b.plain(real_input(b, operation, by.x));
  const int64_t n = by.size;
  expect_or(operation, x.rank() >= 1 && x.sizes.back() == n, [&] { return "its rows have not " + std::to_string(n) + " values"; });
  const auto weight = b.reals(operation, by.weight, "weight", n);
  const PlanView out = b.fresh(x.sizes, plain_strides(x.sizes), true);
  const int64_t rows = x.count() / n;
  b.emit({&x}, out, [=, eps = by.eps](const PlanFrame& frame) {
    each_part(rows, rows * n * 4, [&](int64_t first, int64_t count) {
      for (int64_t i = first; i < first + count; ++i)
        real_kernels().rms_norm(x.reals(frame) + i * n, n, weight ? weight->data() : nullptr, eps, out.reals_out(frame) + i * n);
    });
  });
  return out;
}

}  // namespace octet

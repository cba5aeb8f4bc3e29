// The operators of observers: one pass over a tensor for all that is kept of it.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/rows/activation.h"
#include "core/rows/wrapping.h"
#include "core/rows/histogram_store.h"
#include "torch/errors.h"
#include "torch/operands.h"

namespace octet {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> histogram_op(const Tensor& x, double width, int64_t bins) {
  TORCH_CHECK_VALUE(x.dim() == 1, "x has shape ", x.sizes(), ", expected one dimension");
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, "x is ", x.scalar_type(), ", expected Float");
  const Tensor input = x.contiguous();
  const HistogramGrid grid = translated("", [&] { return HistogramGrid(width, bins); });
  Tensor counts = at::zeros({bins}, x.options().dtype(at::kLong));
  const Seen seen = histogram(input.const_data_ptr<float>(), input.numel(), grid, counts.mutable_data_ptr<int64_t>());
  Tensor extremes = at::empty({2}, x.options()), non_finite = at::empty({2}, counts.options());
  extremes.mutable_data_ptr<float>()[0] = seen.low;
  extremes.mutable_data_ptr<float>()[1] = seen.high;
  non_finite.mutable_data_ptr<int64_t>()[0] = seen.nan;
  non_finite.mutable_data_ptr<int64_t>()[1] = seen.inf;
  return {extremes, non_finite, counts};
}

void check_state(const Tensor& state, const char* name, at::ScalarType dtype, at::IntArrayRef shape) {
  TORCH_CHECK_TYPE(state.scalar_type() == dtype, name, " is ", state.scalar_type(), ", expected ", dtype);
  TORCH_CHECK_VALUE(state.sizes() == shape && state.is_contiguous(), name, " has shape ", state.sizes(), ", expected ", shape,
                    ", contiguous");
}

void observe_histogram_op(const Tensor& x, Tensor& low, Tensor& high, Tensor& nan_count, Tensor& inf_count, Tensor& counts) {
  TORCH_CHECK_VALUE(x.dim() == 2, "x has shape ", x.sizes(), ", expected two dimensions");
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, "x is ", x.scalar_type(), ", expected Float");
  const int64_t rows = x.size(0), n = x.size(1), bins = counts.size(-1);
  check_state(low, "low", at::kFloat, {rows});
  check_state(high, "high", at::kFloat, {rows});
  check_state(nan_count, "nan_count", at::kLong, {});
  check_state(inf_count, "inf_count", at::kLong, {});
  check_state(counts, "counts", at::kLong, {rows, bins});
  const Tensor input = x.contiguous();
  for (int64_t row = 0; row < rows; ++row) {
    const HistogramRow state{low.mutable_data_ptr<float>() + row, high.mutable_data_ptr<float>() + row,
                             counts.mutable_data_ptr<int64_t>() + row * bins, bins};
    const Seen seen = translated("", [&] { return add_to_row(input.const_data_ptr<float>() + row * n, n, state); });
    add_to(*nan_count.mutable_data_ptr<int64_t>(), seen.nan);
    add_to(*inf_count.mutable_data_ptr<int64_t>(), seen.inf);
  }
}

// A tensor as (outer, channels, inner): as it lies where that is possible, else a copy.
struct Channelled {
  Tensor values;
  ChannelLayout layout;
};

Channelled channelled(const Tensor& x, int64_t axis) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, "x is ", x.scalar_type(), ", expected Float");
  TORCH_CHECK_INDEX(axis >= -x.dim() && axis < x.dim(), "axis is ", axis, ", and x has ", x.dim(), " dimensions");
  const int64_t place = axis < 0 ? axis + x.dim() : axis, channels = x.size(place);
  if (!x.is_contiguous()) {
    const Tensor last = x.movedim(place, -1);
    if (last.is_contiguous()) return {last, {channels ? x.numel() / channels : 0, channels, 1}};
  }
  int64_t inner = 1;
  for (int64_t dim = place + 1; dim < x.dim(); ++dim) inner *= x.size(dim);
  return {x.contiguous(), {channels * inner > 0 ? x.numel() / (channels * inner) : 0, channels, inner}};
}

Tensor channel_sums_op(const Tensor& x, int64_t axis) {
  const auto [values, layout] = channelled(x, axis);
  Tensor sums = at::empty({layout.channels}, values.options());
  channel_sums(values.const_data_ptr<float>(), layout, sums.mutable_data_ptr<float>());
  return sums;
}

// The buffers of each mean, one after the other.
constexpr int64_t kMeanBuffers = 4;  // total, count, low, high

void check_means(at::TensorList means, int64_t channels) {
  TORCH_CHECK_VALUE(means.size() % kMeanBuffers == 0, "means has ", means.size(), " tensors, expected ", kMeanBuffers, " for each");
  for (size_t i = 0; i < means.size(); i += kMeanBuffers) {
    check_state(means[i], "total", at::kDouble, {channels});
    check_state(means[i + 1], "count", at::kLong, {});
    check_state(means[i + 2], "low", at::kFloat, {1});
    check_state(means[i + 3], "high", at::kFloat, {1});
  }
}

void add_to_means(const std::vector<float>& sums, int64_t count, at::TensorList means) {
  if (sums.empty()) return;
  const auto [least, most] = std::minmax_element(sums.begin(), sums.end());
  for (size_t i = 0; i < means.size(); i += kMeanBuffers) {
    double* const total = means[i].mutable_data_ptr<double>();
    for (size_t channel = 0; channel < sums.size(); ++channel) total[channel] += static_cast<double>(sums[channel]);
    add_to(*means[i + 1].mutable_data_ptr<int64_t>(), count);
    float* const low = means[i + 2].mutable_data_ptr<float>();
    float* const high = means[i + 3].mutable_data_ptr<float>();
    *low = std::min(*low, *least);
    *high = std::max(*high, *most);
  }
}

// What an observer and the means of the same values keep.
struct Kept {
  Tensor &low, &high, &nan_count, &inf_count, &counts;
  at::TensorList means;
};

// `observe` goes over the values for a row and for the sums of channels, which may be null.
template <class Observe>
void keep(const ChannelLayout& layout, const Kept& kept, const Observe& observe) {
  check_state(kept.low, "low", at::kFloat, {1});
  check_state(kept.high, "high", at::kFloat, {1});
  check_state(kept.nan_count, "nan_count", at::kLong, {});
  check_state(kept.inf_count, "inf_count", at::kLong, {});
  check_state(kept.counts, "counts", at::kLong, {1, kept.counts.size(-1)});
  check_means(kept.means, layout.channels);
  if (layout.size() == 0) return;
  const HistogramRow row{kept.low.mutable_data_ptr<float>(), kept.high.mutable_data_ptr<float>(),
                         kept.counts.mutable_data_ptr<int64_t>(), kept.counts.size(-1)};
  std::vector<float> sums(kept.means.empty() ? 0 : layout.channels);
  const Seen seen = translated("", [&] { return observe(row, sums.empty() ? nullptr : sums.data()); });
  add_to(*kept.nan_count.mutable_data_ptr<int64_t>(), seen.nan);
  add_to(*kept.inf_count.mutable_data_ptr<int64_t>(), seen.inf);
  add_to_means(sums, layout.size() / layout.channels, kept.means);
}

void observe_activation_op(const Tensor& x, int64_t axis, Tensor& low, Tensor& high, Tensor& nan_count, Tensor& inf_count,
                           Tensor& counts, at::TensorList means) {
  const auto [values, layout] = channelled(x, axis);
  const float* const data = values.const_data_ptr<float>();
  keep(layout, {low, high, nan_count, inf_count, counts, means},
       [data, layout = layout](const HistogramRow& row, float* sums) { return observe_activation(data, layout, row, sums); });
}

// The scale and shift of a batch norm in inference, computed as torch's kernel does.
std::pair<std::vector<float>, std::vector<float>> affine(const Tensor& mean, const Tensor& variance, const std::optional<Tensor>& weight,
                                                         const std::optional<Tensor>& bias, double eps, bool contracted) {
  const int64_t channels = mean.numel();
  const auto data = [&](const std::optional<Tensor>& one, const char* name) -> const float* {
    if (!one || !one->defined()) return nullptr;
    check_state(*one, name, at::kFloat, {channels});
    return one->const_data_ptr<float>();
  };
  const float *means = data(mean, "mean"), *variances = data(variance, "variance");
  const float *weights = data(weight, "weight"), *biases = data(bias, "bias");
  std::vector<float> scale(channels), shift(channels);
  for (int64_t c = 0; c < channels; ++c) {
    scale[c] = 1.0f / std::sqrt(variances[c] + static_cast<float>(eps)) * (weights ? weights[c] : 1.0f);
    const float b = biases ? biases[c] : 0.0f;
    shift[c] = contracted ? std::fma(-means[c], scale[c], b) : b - means[c] * scale[c];
  }
  return {std::move(scale), std::move(shift)};
}

void observe_normalized_op(Tensor& x, const std::optional<Tensor>& mean, const std::optional<Tensor>& variance,
                           const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps, bool contracted,
                           double least, double most, Tensor& low, Tensor& high, Tensor& nan_count, Tensor& inf_count,
                           Tensor& counts, at::TensorList means) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, "x is ", x.scalar_type(), ", expected Float");
  TORCH_CHECK_VALUE(x.dim() > 2 && x.is_contiguous(), "x has shape ", x.sizes(), ", expected (batch, channels, ...), contiguous");
  const int64_t channels = x.size(1), planes = x.size(0) * channels;
  const ChannelLayout layout{x.size(0), channels, planes ? x.numel() / planes : 0};
  auto [scale, shift] = mean && variance ? affine(*mean, *variance, weight, bias, eps, contracted)
                                         : std::pair(std::vector<float>(channels, 1.0f), std::vector<float>(channels, -0.0f));
  TORCH_CHECK_VALUE(static_cast<int64_t>(scale.size()) == channels, "mean has ", scale.size(), " values, expected ", channels);
  const Normalization by{scale.data(), shift.data(), contracted, static_cast<float>(least), static_cast<float>(most)};
  float* const data = x.mutable_data_ptr<float>();
  keep(layout, {low, high, nan_count, inf_count, counts, means},
       [&](const HistogramRow& row, float* sums) { return observe_normalized(data, layout, by, row, sums); });
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("histogram", &Defined<&histogram_op>::call);
  m.impl("observe_histogram", &Defined<&observe_histogram_op>::call);
  m.impl("channel_sums", &Defined<&channel_sums_op>::call);
  m.impl("observe_activation", &Defined<&observe_activation_op>::call);
  m.impl("observe_normalized", &Defined<&observe_normalized_op>::call);
}

}  // namespace octet

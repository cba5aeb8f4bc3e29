// The operators histogram and observe_histogram: one pass over a tensor for an observer.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "core/rows/histogram_store.h"
#include "torch/errors.h"

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
    *nan_count.mutable_data_ptr<int64_t>() += seen.nan;
    *inf_count.mutable_data_ptr<int64_t>() += seen.inf;
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("histogram", &histogram_op);
  m.impl("observe_histogram", &observe_histogram_op);
}

}  // namespace octet

// The operator histogram: one pass over a tensor for an observer.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "core/rows/histogram.h"
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

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) { m.impl("histogram", &histogram_op); }

}  // namespace octet

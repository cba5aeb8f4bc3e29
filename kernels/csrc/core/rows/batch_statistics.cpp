#include "core/rows/batch_statistics.h"

#include <algorithm>

#include "core/cpu/threads.h"
#include "core/rows/rows.h"

namespace octet {
namespace {

constexpr int64_t kValuesPerThread = 1 << 15;

}  // namespace

void batch_statistics(const float* x, int64_t batch, int64_t channels, int64_t n, float* mean, float* variance) {
  const int64_t values = batch * n;
  const auto total = [&](int64_t channel, auto of_row) {
    double sum = 0.0;
    for (int64_t sample = 0; sample < batch; ++sample) sum += of_row(x + (sample * channels + channel) * n);
    return sum;
  };
  const RowKernels& kernels = row_kernels();
  each_range(channels, std::max<int64_t>(1, kValuesPerThread / std::max<int64_t>(1, values)), [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; ++channel) {
      const double sum = total(channel, [&](const float* row) { return kernels.sum(row, n); });
      const float middle = static_cast<float>(sum / static_cast<double>(values));
      const double squares = total(channel, [&](const float* row) { return kernels.squares(row, n, middle); });
      mean[channel] = middle;
      variance[channel] = static_cast<float>(static_cast<float>(squares) / static_cast<double>(values));
    }
  });
}

}  // namespace octet

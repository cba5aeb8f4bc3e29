#include "core/rows/fake_quantize.h"

#include <algorithm>

#include "core/cpu/threads.h"
#include "core/rows/rows.h"

namespace octet {
namespace {

constexpr int64_t kGrain = 32768;

}  // namespace

void fake_quantize(const FakeQuantization& by, const float* x, int64_t n, float* out, bool* inside) {
  each_range(n, kGrain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / by.inner, last = std::min(end, (row + 1) * by.inner), channel = row % by.channels;
      const FakeQuantizer quantizer{by.scale[channel],
                                    static_cast<float>(by.zero_point[channel]),
                                    static_cast<float>(by.quant_min),
                                    static_cast<float>(by.quant_max),
                                    static_cast<float>(by.low),
                                    static_cast<float>(by.high)};
      row_kernels().fake_quantize(x + begin, last - begin, quantizer, out + begin, inside ? inside + begin : nullptr);
      begin = last;
    }
  });
}

void masked_gradient(const float* grad, const bool* inside, int64_t n, float* out) {
  each_range(n, kGrain,
             [&](int64_t begin, int64_t end) { row_kernels().masked(grad + begin, inside + begin, end - begin, out + begin); });
}

}  // namespace octet

// The statistics that a batch norm normalises by, over a batch of channels.
#pragma once

#include <cstdint>

namespace octet {

// mean (channels,) and biased variance (channels,) of x (batch, channels, n), as torch computes them: sums in double, the
// squares and the results in float32.
void batch_statistics(const float* x, int64_t batch, int64_t channels, int64_t n, float* mean, float* variance);

}  // namespace octet

// One pass over a layer's activations for all that calibration keeps of them: what a histogram's row keeps, and the sum of each
// channel; on the way a batch norm and a clamp, in place. Each value is read once while it is in the cache.
#pragma once

#include <cstdint>

#include "core/rows/histogram_store.h"

namespace octet {

// Values (outer, channels, inner), dense.
struct ChannelLayout {
  int64_t outer, channels, inner;

  int64_t size() const { return outer * channels * inner; }
};

// y = x * scale[channel] + shift[channel], then clamped: a batch norm in inference and the activation behind it.
struct Normalization {
  const float* scale;  // (channels,)
  const float* shift;  // (channels,)
  bool contracted;     // whether the product is rounded only with the sum
  float low, high;     // infinite where there is no clamp
};

// sums (channels,): of each channel in double, in an order that neither threads nor instruction sets change, rounded to float32.
// What is not finite counts as 0.
void channel_sums(const float* x, const ChannelLayout& layout, float* sums);

// Adds x to the row, and its channels to sums (channels,) as channel_sums does; `sums` may be null.
Seen observe_activation(const float* x, const ChannelLayout& layout, const HistogramRow& row, float* sums);

// Normalises x in place, and observes what comes out.
Seen observe_normalized(float* x, const ChannelLayout& layout, const Normalization& by, const HistogramRow& row, float* sums);

}  // namespace octet

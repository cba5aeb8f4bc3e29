#include "core/rows/byte_cache.h"

#include <algorithm>
#include <cmath>

#include "core/cpu/of_thread.h"
#include "core/cpu/scratch.h"
#include "core/cpu/threads.h"
#include "core/rows/reals.h"

namespace octet {
namespace {

constexpr int64_t kProductsPerThread = 1 << 16;

// The largest magnitude; NaN where there is one, as it would be of every value.
float largest_of(const float* x, int64_t n) {
  float most = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    const float size = std::abs(x[i]);
    most = size > most ? size : most;
    finite &= size <= 3.40282347e38f;
  }
  return finite ? most : NAN;
}

// Rows of one head that are scored and mixed together.
struct Rows {
  const CacheAttention& call;
  int64_t batch, kept, first, count;  // of the group * queries rows of a kept head

  int64_t head(int64_t row) const { return (first + row) / call.queries; }  // of the group
  int64_t query(int64_t row) const { return (first + row) % call.queries; }

  // Scores, which it changes, to weights of the values as they are kept: zeros where every key is forbidden.
  void soften(int64_t row, float* scores, float* weights) const {
    const int64_t seen = call.causal ? std::min(call.length, call.length - call.queries + query(row) + 1) : call.length;
    const float* const scale = call.key_scale + (batch * call.kept + kept) * call.capacity;
    const float* const by = call.value_scale + (batch * call.kept + kept) * call.capacity;
    for (int64_t j = 0; j < seen; ++j) scores[j] *= scale[j] * call.scale;
    if (call.mask) {
      const float* const mask = call.mask + batch * call.mask_batch + (kept * call.group + head(row)) * call.mask_head +
                                query(row) * call.mask_query;
      for (int64_t j = 0; j < seen; ++j) scores[j] += mask[j * call.mask_key];
    }
    if (seen <= 0 || std::all_of(scores, scores + seen, [](float score) { return score == -HUGE_VALF; })) {
      std::fill_n(weights, call.length, 0.0f);
      return;
    }
    real_kernels().softmax(scores, seen, false, weights);
    for (int64_t j = 0; j < seen; ++j) weights[j] *= by[j];
    std::fill(weights + seen, weights + call.length, 0.0f);
  }

  void to(float* room, float* out) const {
    const int64_t at = batch * call.kept + kept, row = at * call.group * call.queries + first;
    const int64_t blocks = (call.length + kKeysOfBlock - 1) / kKeysOfBlock, ld = blocks * kKeysOfBlock;
    real_kernels().score_bytes(call.q + row * call.width, call.width, count, call.keys + at * call.capacity * call.width, blocks,
                               call.width, room, ld);
    float* const weights = room + count * ld;
    for (int64_t r = 0; r < count; ++r) soften(r, room + r * ld, weights + r * ld);
    real_kernels().mix_bytes(weights, ld, count, call.values + at * call.capacity * call.mixed, call.length, call.mixed,
                             out + row * call.mixed, call.mixed);
  }
};

}  // namespace

void CacheWrite::to(int8_t* q, float* scale) const {
  each_range(heads * tokens, std::max<int64_t>(1, kProductsPerThread / (width + 1)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t h = i / tokens, place = start + i % tokens;
      const float* const row = x + h * head + i % tokens * token;
      const float most = largest_of(row, width), by = most == 0.0f ? 1.0f : most / 127.0f;
      int8_t* const to = q + h * capacity * width +
                         (blocked ? place / kKeysOfBlock * kKeysOfBlock * width + place % kKeysOfBlock : place * width);
      const int64_t step = blocked ? kKeysOfBlock : 1;
      scale[h * capacity + place] = by;
      for (int64_t c = 0; c < width; ++c) {
        const float value = std::nearbyint(row[c] / by);
        // What is not finite has a scale that says so.
        to[c * step] = value == value ? static_cast<int8_t>(std::clamp(value, -127.0f, 127.0f)) : int8_t{1};
      }
    }
  });
}

void CacheAttention::to(float* out) const {
  const int64_t rows = group * queries, groups = (rows + kRowsOfBytes - 1) / kRowsOfBytes;
  const int64_t products = std::max<int64_t>(1, kRowsOfBytes * length * (width + mixed));
  each_range(batch * kept * groups, std::max<int64_t>(1, kProductsPerThread / products), [&](int64_t begin, int64_t end) {
    thread_local Scratch<float>* own = nullptr;
    float* const room = of_thread(own).get(2 * kRowsOfBytes * (length + kKeysOfBlock));
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit % groups * kRowsOfBytes, head = unit / groups;
      Rows{*this, head / kept, head % kept, first, std::min(kRowsOfBytes, rows - first)}.to(room, out);
    }
  });
}

}  // namespace octet

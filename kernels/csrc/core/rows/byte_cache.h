// What attention keeps of earlier tokens as int8, and attention to it: keys and values symmetric, with a scale for each token and head.
//
// Keys (heads, capacity / 16, width, 16) lie so that one load has a value of sixteen keys; values (heads, capacity, width) as they come.
#pragma once

#include <cstdint>

namespace octet {

// x (heads, tokens, width) to the places from `start` on, its values `head`, `token` and 1 apart. Each row is
// round(x / scale), its scale the largest magnitude over 127, or 1 for a row of zeros.
struct CacheWrite {
  const float* x;
  int64_t head, token;
  int64_t heads, tokens, width, capacity, start;
  bool blocked;  // as keys lie

  void to(int8_t* q, float* scale) const;
};

// softmax(q k' * scale + mask) v over the first `length` keys of each of `kept` heads of a batch, where `group` heads of
// queries share one of them. Rows of which every key is forbidden give zeros.
struct CacheAttention {
  const float* q;                   // (batch, kept * group, queries, width), contiguous
  const int8_t *keys, *values;      // of a batch and a head: (capacity / 16, width, 16) and (capacity, mixed)
  const float *key_scale, *value_scale;  // (batch, kept, capacity)
  int64_t batch, kept, group, queries, width, mixed, capacity, length;
  float scale;
  bool causal;  // query i sees the keys before length - queries + i + 1
  const float* mask;  // added to the scores; or null
  int64_t mask_batch, mask_head, mask_query, mask_key;  // how far these are apart in it

  void to(float* out) const;  // (batch, kept * group, queries, mixed)
};

}  // namespace octet

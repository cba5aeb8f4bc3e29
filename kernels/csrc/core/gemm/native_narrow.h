// Kernels of narrow weights, one table per instruction set.
#pragma once

#include <cstdint>

namespace octet {

// Outputs and inputs whose bytes lie together (kernels/narrow.py: a panel there), which are the unit of work that threads share; and
// those whose four bytes fill a vector of 64.
constexpr int64_t kNarrowUnit = 64, kNarrowBlock = 32, kNarrowPanel = 16;

struct NarrowWeight {
  const uint8_t* bytes;  // of all units
  const uint8_t* tail;   // of the last unit, filled up to 64
  const int32_t* tail_sums;  // of its last panel, of NarrowOut::row_sums, filled up to 16
  int64_t n, k;
  int bits;
  int64_t group;               // inputs that share a scale
  const void* scales;          // (units, groups, 64) float16 or float32; null for sums
  bool half_scales;
  const uint8_t* zero_points;  // alike, or null where all are 2**(bits - 1)
  const float* row_reals;      // (units, 64), of equation 11
};

// Rows of activations less 128. There is memory for a multiple of 16, and for 64 values behind each.
struct NarrowRows {
  const int8_t* x;
  int64_t ld, m;
  const int32_t* sums;         // (m, groups), of the inputs of each group
  const int32_t* starts;       // (m, groups), -2**(bits - 1) times those: what sums around the middle begin with; of reals
  const int32_t* zero_points;  // (m,), less 128; of reals
};

// Exactly one of `sums` and `reals` is set.
struct NarrowOut {
  int32_t* sums;
  const int32_t* row_sums;  // (n,), of the weight's integers around 0
  float* reals;
  int64_t ld;
};

struct NativeNarrow {
  const char* route;
  // q - 128 of a row of k activations, and the sums of its groups.
  void (*prepare)(const uint8_t* q, int64_t k, int64_t group, int8_t* x, int32_t* sums);
  // Units [first, last), or the same from the last to the first.
  void (*run)(const NarrowWeight& weight, const NarrowRows& rows, const NarrowOut& out, int64_t first, int64_t last,
              bool backwards);
  // The integers of a unit less 2**(bits - 1), as tile.h packs groups of 64 outputs: [k / 4][panel][16][4], of the panels that
  // are there.
  void (*unpack)(const NarrowWeight& weight, int64_t unit, int8_t* to);
  // Whether `run` unpacks a unit once for so many rows, so that the more of them it gets at a time the better. Null where it never does.
  bool (*takes_whole)(const NarrowWeight& weight, int64_t rows);
};

const NativeNarrow& native_narrow();

}  // namespace octet

// Our own GEMM kernels, one table per instruction set.
#pragma once

#include <cstdint>

#include "core/rows/requantize.h"

namespace octet {

// A weight is packed in groups of outputs; a group is the unit of work that threads share.
struct NativeGemm {
  const char* route;
  int64_t group;  // outputs of one
  int64_t (*packed_bytes)(int64_t n, int64_t k);
  void (*pack)(const int8_t* weight, int64_t n, int64_t k, int8_t* packed);
  // Sums of groups [first, last), or the same from the last to the first, for rows [0, m); x, ldx and acc as in
  // PackedGemm::run.
  void (*run)(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k, int32_t* acc,
              int64_t ldacc, int64_t first, int64_t last, bool backwards);
  // The same, requantised tile by tile; null where there is no such kernel.
  void (*run_u8)(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k,
                 const Requantize& by, uint8_t* out, int64_t ldout, int64_t first, int64_t last);
  // The same as reals, (sums + offset) * multiplier; there wherever run_u8 is.
  void (*run_f32)(const uint8_t* x, int64_t ldx, int64_t m, const int8_t* packed, int64_t n, int64_t k,
                  const Requantize& by, float* out, int64_t ldout, int64_t first, int64_t last);
  // run_u8 of all groups for m rows that begin at `rows` and lie in pieces; null where rows are gathered first.
  void (*run_pieces_u8)(const uint8_t* const* rows, const Pieces& pieces, int64_t m, const int8_t* packed, int64_t n,
                        const Requantize& by, uint8_t* out, int64_t ldout);
  // Whether run_u8 takes so many rows in one call, in blocks of its own, and adds by.residual. Null where it never does. Tables that
  // have it pack groups of 64 outputs as tile.h does in steps of 4 (narrow_gemm.cpp makes such groups too).
  bool (*takes_whole)(int64_t m, int64_t n, int64_t k);
  // Whether run_image_u8 is faster than gathering the rows. Null where rows of an image are never multiplied as they lie, and
  // then run_image_u8 is.
  bool (*serves_image)(const ImageRows& rows, int64_t n);
  // run_u8 of rows that lie in an image, with by.residual; `out` has one after the other.
  void (*run_image_u8)(const ImageRows& rows, const int8_t* packed, int64_t n, const Requantize& by, uint8_t* out,
                       int64_t ldout, int64_t first, int64_t last);
};

// The kernel for this CPU; the one for weights that pass pairs_fit_int16 and the one for weights above -128, or null where they
// need none of their own.
const NativeGemm& native_gemm();
const NativeGemm* native_gemm_of_safe_pairs();
const NativeGemm* native_gemm_of_symmetric();

}  // namespace octet

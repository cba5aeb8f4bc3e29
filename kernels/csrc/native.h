// Our own GEMM kernels, one table per instruction set. No torch header is included here or below.
#pragma once

#include <cstdint>

namespace octet {

// Equation 7, with what equation 6 adds to the raw sums of a channel in one number. Both arrays have room for a whole
// vector past their end.
struct Requantize {
  const int32_t* offset;    // bias - input zero point * row_sum
  const float* multiplier;
  int32_t zero_point, bottom, top;
  bool shrinks = false;  // every multiplier is below 1, so that no sum times its own leaves int32
};

// How the activations of a row lie in pieces: piece i at starts[i] from where the row begins. Each is packed as a whole
// number of steps, and read to the end of its last one.
struct Pieces {
  const int64_t* starts;
  int64_t count, bytes;
};

constexpr int64_t kPieceStep = 4;

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
  // run_u8 of all groups for m rows that begin at `rows` and lie in pieces; null where there is no such kernel.
  void (*run_pieces_u8)(const uint8_t* const* rows, const Pieces& pieces, int64_t m, const int8_t* packed, int64_t n,
                        const Requantize& by, uint8_t* out, int64_t ldout) = nullptr;
};

// Depthwise convolutions, requantised from registers. Their input lies in rows of their own, with room for a vector past
// their end: blocks of channels, and in each the columns of the row side by side.
struct NativeDepthwise {
  // Bytes of a column in all blocks together.
  int64_t (*placed_bytes)(int64_t channels);
  // Pixels (count, channels) to the columns [first, first + count) of a row with `columns` columns, `border` to the others.
  void (*place)(const uint8_t* pixels, int64_t count, int64_t channels, int64_t first, int64_t columns, uint8_t border,
                uint8_t* row);
  int64_t (*packed_bytes)(int64_t channels, int64_t height, int64_t width);
  // weight (channels, height, width); packed is aligned to 64 bytes.
  void (*pack)(const int8_t* weight, int64_t channels, int64_t height, int64_t width, int8_t* packed);
  // Values of 4 bytes per channel in the order of the kernel's registers, and how many there are.
  int64_t (*arranged)(int64_t channels);
  void (*arrange)(const void* by_channel, int64_t channels, void* out);
  // A row of output pixels (pixels, channels) from `height` rows with `columns` columns; the first pixel sees the first
  // `width` of them. height <= kDepthwiseMost. offset and multiplier of `by` are arranged, and no sum times its multiplier
  // leaves int32.
  void (*row)(const uint8_t* const* rows, int64_t columns, int64_t pixels, int64_t channels, int64_t height, int64_t width,
              int64_t stride, const int8_t* packed, const Requantize& by, uint8_t* out);
};

constexpr int64_t kDepthwiseMost = 32;

// A tile of 4 x 4 pixels that Winograd's kernels compute at once.
struct WinogradTile {
  const uint8_t* in[36];  // the pixels around, 6 x 6
  uint8_t* out[4];        // the first pixel of each row; the next ones lie behind it
  int height, width;      // of what is inside the image
};

// 3 x 3 convolutions of stride 1 by Winograd's algorithm, exact for weights that PackedWinograd takes.
struct NativeWinograd {
  int64_t channels;  // are a multiple of this
  int64_t (*packed_bytes)(int64_t outputs, int64_t channels);
  // weight (outputs, channels, 3, 3)
  void (*pack)(const int8_t* weight, int64_t outputs, int64_t channels, int8_t* packed);
  int64_t (*scratch_bytes)(int64_t tiles, int64_t channels);
  // out has row stride `outputs`; scratch is aligned to 64 bytes.
  void (*run)(const WinogradTile* tiles, int64_t count, int64_t channels, const int8_t* packed, int64_t outputs,
              const Requantize& by, void* scratch);
};

extern const NativeGemm kPortableGemm;
#if defined(__x86_64__)
extern const NativeGemm kAvx2PairwiseGemm;  // only for weights that pass pairs_fit_int16
extern const NativeGemm kAvx2WideGemm;
extern const NativeGemm kAvxVnniGemm;
extern const NativeGemm kAvx512VnniGemm;
extern const NativeDepthwise kAvx2Depthwise;
extern const NativeDepthwise kAvxVnniDepthwise;
extern const NativeDepthwise kAvx512VnniDepthwise;
extern const NativeWinograd kAvx2Winograd;
extern const NativeWinograd kAvxVnniWinograd;
extern const NativeWinograd kAvx512VnniWinograd;
#elif defined(__aarch64__)
extern const NativeGemm kNeonGemm;
extern const NativeGemm kNeonDotGemm;
extern const NativeGemm kNeonI8mmGemm;
#endif

// The kernel for this CPU, or null.
const NativeDepthwise* native_depthwise();
const NativeWinograd* native_winograd();

}  // namespace octet

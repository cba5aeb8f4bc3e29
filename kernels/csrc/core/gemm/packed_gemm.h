// The one contract every library meets: exact int32 sums of u8 * s8 products over a packed weight.
//
// Zero points, scales, biases and activations are not here: whole layers (linear.cpp, rnn.cpp) apply them to these sums,
// the same way for every library, which is what makes the libraries agree to the bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/cpu/scratch.h"
#include "core/rows/requantize.h"

namespace octet {

// Largest K whose sums fit int32 with room for a bias of up to 2**30: (2**31 - 1 - 2**30) / (255 * 127).
constexpr int64_t kMaxK = (2147483647LL - (1LL << 30)) / (255 * 127);

// Raises std::invalid_argument where k is above kMaxK.
void check_products(int64_t k);

class PackedGemm {
 public:
  // Raises std::invalid_argument where k is above kMaxK.
  PackedGemm(const int8_t* weight, int64_t n, int64_t k);
  virtual ~PackedGemm() = default;
  PackedGemm(const PackedGemm&) = delete;
  PackedGemm& operator=(const PackedGemm&) = delete;

  // acc[m * ldacc + j] = sum over i of x[m * ldx + i] * weight[j * K + i], exactly.
  // x: kSlack readable bytes around it and ldx >= K rounded up to 4. Thread `thread` of `threads` computes its share;
  // the shares are disjoint and no thread waits for another.
  virtual void run(const uint8_t* x, int64_t ldx, int64_t m, int32_t* acc, int64_t ldacc, int thread,
                   int threads) const = 0;
  // The same with the last outputs first, where the library can: a weight that is larger than a cache is then read again
  // from the end that is still there.
  virtual void run_backwards(const uint8_t* x, int64_t ldx, int64_t m, int32_t* acc, int64_t ldacc, int thread,
                             int threads) const {
    run(x, ldx, m, acc, ldacc, thread, threads);
  }

  // out[m * ldout + j] = equation 7 of the same sums. x needs no bytes around it where K is a multiple of 4. False where
  // the library has no such kernel, and then nothing was written.
  virtual bool run_u8(const uint8_t* x, int64_t ldx, int64_t m, const Requantize& by, uint8_t* out, int64_t ldout,
                      int thread = 0, int threads = 1) const {
    (void)x, (void)ldx, (void)m, (void)by, (void)out, (void)ldout, (void)thread, (void)threads;
    return false;
  }
  // The same as reals: (sums + by.offset) * by.multiplier.
  virtual bool run_f32(const uint8_t* x, int64_t ldx, int64_t m, const Requantize& by, float* out, int64_t ldout,
                       int thread = 0, int threads = 1) const {
    (void)x, (void)ldx, (void)m, (void)by, (void)out, (void)ldout, (void)thread, (void)threads;
    return false;
  }
  // The first output of a thread's share of these and of run's; -1 where the library shares them in its own way.
  virtual int64_t first_output(int thread, int threads) const { return threads == 1 ? n_ * thread : -1; }
  // Whether run_u8 and run_f32 compute.
  virtual bool requantizes() const { return false; }
  // run_u8 where row m begins at rows[m] and lies in pieces, whose steps together are K. False as there.
  virtual bool run_pieces_u8(const uint8_t* const* rows, const Pieces& pieces, int64_t m, const Requantize& by, uint8_t* out,
                             int64_t ldout) const {
    (void)rows, (void)pieces, (void)m, (void)by, (void)out, (void)ldout;
    return false;
  }
  virtual bool takes_pieces() const { return false; }
  // Whether run_u8 takes so many rows in one call, in blocks of its own, and adds by.residual: its other side lies as `out` does.
  virtual bool takes_whole(int64_t rows) const {
    (void)rows;
    return false;
  }
  // Whether run_image_u8 computes, and faster than run_u8 after these rows are gathered.
  virtual bool serves_image(const ImageRows& rows) const {
    (void)rows;
    return false;
  }
  // run_u8 of the rows of an image, whose pieces together are K, with by.residual, where serves_image says so; `out` has one after
  // the other.
  virtual void run_image_u8(const ImageRows& rows, const Requantize& by, uint8_t* out, int64_t ldout, int thread,
                            int threads) const {
    (void)rows, (void)by, (void)out, (void)ldout, (void)thread, (void)threads;
  }

  // How the products are formed, for the report: "vnni", "pairwise", "wide", "split", ...
  virtual std::string route() const = 0;

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  // sum over i of weight[j * K + i]: removes the activation's zero point from the sums (equation 6).
  const int32_t* row_sums() const { return row_sums_.data(); }
  // Memory that it holds, for the report.
  int64_t bytes() const { return packed_bytes() + n_ * static_cast<int64_t>(sizeof(int32_t)); }

 private:
  virtual int64_t packed_bytes() const = 0;  // all but row_sums

  int64_t n_, k_;
  std::vector<int32_t> row_sums_;
};

// True where no adjacent pair of a row can overflow int16 in u8 * s8 + u8 * s8, whatever the activations: the pair's
// positive and negative parts each sum to at most 128 (255 * 128 = 32640 <= 32767).
bool pairs_fit_int16(const int8_t* weight, int64_t n, int64_t k);

// Splits a weight into two that each pass pairs_fit_int16 and add up to it: clamp to +-64, and the rest.
std::vector<int8_t> clamped_part(const int8_t* weight, int64_t size);
std::vector<int8_t> remaining_part(const int8_t* weight, int64_t size);

// The core's own library: the kernels of this CPU.
std::unique_ptr<PackedGemm> pack_native(const int8_t* weight, int64_t n, int64_t k);

}  // namespace octet

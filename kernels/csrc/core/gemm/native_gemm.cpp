// The core's own library: this CPU's kernel and, on AVX2, the route that a weight allows.
#include <algorithm>
#include <cstdlib>

#include "core/cpu/memory.h"
#include "core/gemm/native_gemm.h"
#include "core/gemm/packed_gemm.h"

namespace octet {
namespace {

const NativeGemm& choose(const int8_t* weight, int64_t n, int64_t k) {
  const NativeGemm* const safe = native_gemm_of_safe_pairs();
  if (safe && pairs_fit_int16(weight, n, k)) return *safe;
  const NativeGemm* const symmetric = native_gemm_of_symmetric();
  if (symmetric && std::find(weight, weight + n * k, -128) == weight + n * k) return *symmetric;
  return native_gemm();
}

struct Free {
  void operator()(int8_t* memory) const { std::free(memory); }
};

class NativePacked final : public PackedGemm {
 public:
  NativePacked(const int8_t* weight, int64_t n, int64_t k) : PackedGemm(weight, n, k), gemm_(choose(weight, n, k)) {
    packed_bytes_ = (gemm_.packed_bytes(n, k) + kSlack + 63) / 64 * 64;
    packed_.reset(static_cast<int8_t*>(std::aligned_alloc(64, packed_bytes_)));
    if (!packed_) throw_no_memory(packed_bytes_, "a packed weight");
    gemm_.pack(weight, n, k, packed_.get());
  }

  void run(const uint8_t* x, int64_t ldx, int64_t m, int32_t* acc, int64_t ldacc, int thread,
           int threads) const override {
    run_share(x, ldx, m, acc, ldacc, thread, threads, false);
  }

  void run_backwards(const uint8_t* x, int64_t ldx, int64_t m, int32_t* acc, int64_t ldacc, int thread,
                     int threads) const override {
    run_share(x, ldx, m, acc, ldacc, thread, threads, true);
  }

  bool run_u8(const uint8_t* x, int64_t ldx, int64_t m, const Requantize& by, uint8_t* out, int64_t ldout, int thread,
              int threads) const override {
    if (!gemm_.run_u8) return false;
    gemm_.run_u8(x, ldx, m, packed_.get(), n(), k(), by, out, ldout, first_group(thread, threads),
                 first_group(thread + 1, threads));
    return true;
  }

  bool run_f32(const uint8_t* x, int64_t ldx, int64_t m, const Requantize& by, float* out, int64_t ldout, int thread,
               int threads) const override {
    if (!gemm_.run_f32) return false;
    gemm_.run_f32(x, ldx, m, packed_.get(), n(), k(), by, out, ldout, first_group(thread, threads),
                  first_group(thread + 1, threads));
    return true;
  }

  int64_t first_output(int thread, int threads) const override {
    return std::min(n(), first_group(thread, threads) * gemm_.group);
  }

  bool requantizes() const override { return gemm_.run_u8 != nullptr; }

  bool run_pieces_u8(const uint8_t* const* rows, const Pieces& pieces, int64_t m, const Requantize& by, uint8_t* out,
                     int64_t ldout) const override {
    if (!gemm_.run_pieces_u8) return false;
    gemm_.run_pieces_u8(rows, pieces, m, packed_.get(), n(), by, out, ldout);
    return true;
  }

  bool takes_pieces() const override { return gemm_.run_pieces_u8 != nullptr; }

  bool takes_whole(int64_t rows) const override { return gemm_.takes_whole && gemm_.takes_whole(rows, n(), k()); }

  bool serves_image(const ImageRows& rows) const override { return gemm_.serves_image && gemm_.serves_image(rows, n()); }

  void run_image_u8(const ImageRows& rows, const Requantize& by, uint8_t* out, int64_t ldout, int thread,
                    int threads) const override {
    gemm_.run_image_u8(rows, packed_.get(), n(), by, out, ldout, first_group(thread, threads), first_group(thread + 1, threads));
  }

  std::string route() const override { return gemm_.route; }

 private:
  int64_t first_group(int64_t thread, int64_t threads) const {
    return (n() + gemm_.group - 1) / gemm_.group * thread / threads;
  }

  void run_share(const uint8_t* x, int64_t ldx, int64_t m, int32_t* acc, int64_t ldacc, int thread, int threads,
                 bool backwards) const {
    gemm_.run(x, ldx, m, packed_.get(), n(), k(), acc, ldacc, first_group(thread, threads),
              first_group(thread + 1, threads), backwards);
  }

  int64_t packed_bytes() const override { return packed_bytes_; }

  const NativeGemm& gemm_;
  std::unique_ptr<int8_t[], Free> packed_;
  int64_t packed_bytes_ = 0;
};

}  // namespace

std::unique_ptr<PackedGemm> pack_native(const int8_t* weight, int64_t n, int64_t k) {
  return std::make_unique<NativePacked>(weight, n, k);
}

}  // namespace octet

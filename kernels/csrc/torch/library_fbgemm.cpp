// FBGEMM (x86-64), through its own C++ interface inside libtorch_cpu.
//
// Without VNNI its int8 kernels add u8 * s8 pairs in int16 and saturate (pytorch/FBGEMM#125). Whether the kernels that it
// picked here do is probed once with the worst case, not guessed from the CPU. Where they do, a weight whose pairs could
// overflow is split in two that cannot, and multiplied twice: exact, at twice the price.
#include "torch/libraries.h"

#if defined(__x86_64__)
#include <fbgemm/Fbgemm.h>

#include "core/cpu/isa.h"

namespace octet {
namespace {

using PackB = fbgemm::PackBMatrix<int8_t, int32_t>;

void multiply(const uint8_t* x, int64_t ldx, int64_t m, PackB& weight, int32_t* acc, int64_t ldacc, int thread,
              int threads) {
  fbgemm::PackAMatrix<uint8_t, int32_t> a(fbgemm::matrix_op_t::NoTranspose, static_cast<int32_t>(m), weight.numRows(),
                                          x, static_cast<int32_t>(ldx), nullptr, 1);
  fbgemm::DoNothing<int32_t, int32_t> nothing{};
  fbgemm::memCopy<> copy(nothing);
  fbgemm::fbgemmPacked(a, weight, acc, acc, static_cast<uint32_t>(ldacc), copy, thread, threads);
}

std::unique_ptr<PackB> pack_b(const int8_t* weight, int64_t n, int64_t k) {
  // Transpose: PyTorch's weight is (N, K); FBGEMM multiplies by (K, N).
  return std::make_unique<PackB>(fbgemm::matrix_op_t::Transpose, static_cast<int32_t>(k), static_cast<int32_t>(n),
                                 weight, static_cast<int32_t>(k), nullptr, 1);
}

int64_t bytes_of(const PackB& packed) {
  return int64_t{packed.blockRows()} * packed.blockRowSize() * packed.blockCols() * packed.blockColSize();
}

bool saturates() {
  static const bool wrong = [] {
    constexpr int n = 16, k = 64;
    const std::vector<int8_t> weight(n * k, 127);
    std::vector<uint8_t> x(2 * kSlack + k, 255);
    std::vector<int32_t> acc(n);
    auto packed = pack_b(weight.data(), n, k);
    multiply(x.data() + kSlack, k, 1, *packed, acc.data(), n, 0, 1);
    return acc[0] != 255 * 127 * k;
  }();
  return wrong;
}

class FbgemmPacked final : public PackedGemm {
 public:
  FbgemmPacked(const int8_t* weight, int64_t n, int64_t k) : PackedGemm(weight, n, k) {
    if (!saturates() || pairs_fit_int16(weight, n, k)) {
      packed_ = pack_b(weight, n, k);
      return;
    }
    packed_ = pack_b(clamped_part(weight, n * k).data(), n, k);
    rest_ = pack_b(remaining_part(weight, n * k).data(), n, k);
  }

  void run(const uint8_t* x, int64_t ldx, int64_t m, int32_t* acc, int64_t ldacc, int thread,
           int threads) const override {
    if (!rest_) return multiply(x, ldx, m, *packed_, acc, ldacc, thread, threads);
    // FBGEMM divides the output among threads as it likes, so the second product is added by one of them.
    if (thread != 0) return;
    multiply(x, ldx, m, *packed_, acc, ldacc, 0, 1);
    std::vector<int32_t> rest(m * n());
    multiply(x, ldx, m, *rest_, rest.data(), n(), 0, 1);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n(); ++j) acc[i * ldacc + j] += rest[i * n() + j];
  }

  std::string route() const override { return rest_ ? "split" : saturates() ? "pairwise" : "vnni"; }

 private:
  int64_t packed_bytes() const override { return bytes_of(*packed_) + (rest_ ? bytes_of(*rest_) : 0); }

  std::unique_ptr<PackB> packed_, rest_;
};

}  // namespace

std::unique_ptr<PackedGemm> pack_fbgemm(const int8_t* weight, int64_t n, int64_t k) {
  return std::make_unique<FbgemmPacked>(weight, n, k);
}

std::string why_not_fbgemm() {
  // QUANT_ISA lowers FBGEMM too, so that a test of the guard runs on a CPU that needs none.
  static const bool lowered = [] {
    const bool has_vnni = isa_needs(cpu_feature::avx_vnni) || isa_needs(cpu_feature::avx512_vnni);
    if (!has_vnni) fbgemm::fbgemmForceIsa(fbgemm::inst_set_t::avx2);
    return true;
  }();
  (void)lowered;
  if (!isa_needs(cpu_feature::avx2)) return "FBGEMM needs AVX2, which this CPU lacks (or QUANT_ISA forbids)";
  return fbgemm::fbgemmSupportedCPU() ? "" : "FBGEMM does not support this CPU (it needs AVX2 and FMA)";
}

}  // namespace octet
#else
namespace octet {

std::unique_ptr<PackedGemm> pack_fbgemm(const int8_t*, int64_t, int64_t) { return nullptr; }
std::string why_not_fbgemm() { return "FBGEMM's int8 kernels exist on x86-64 only"; }

}  // namespace octet
#endif

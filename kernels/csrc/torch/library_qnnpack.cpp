// QNNPACK (ARM NEON; its SSE2 build on x86-64), inside libtorch_cpu. The wheel ships no complete header for it, so the
// prototypes stand here, as qnnpack_func.h of the wheel has them.
//
// Its weights are uint8 with a zero point: ours are shifted by 128. Its kernels widen to int16 before they multiply, so
// nothing saturates. The dynamic linear hands the sums back as float32, exact up to 2**24, so K is cut into panels whose
// sums cannot exceed that and which are added in int32.
#include "torch/libraries.h"

#include <algorithm>
#include <stdexcept>

struct pthreadpool;

extern "C" int pytorch_qnnp_initialize();

namespace qnnpack {

class PackBMatrix final {
 public:
  PackBMatrix(size_t input_channels, size_t output_channels, const uint8_t* kernel_zero_points,
              const float* requantization_scale, const uint8_t* kernel, const int32_t* bias);
  void* getPackedWeights() const { return packed_weights_; }
  ~PackBMatrix() { free(packed_weights_); }
  PackBMatrix(const PackBMatrix&) = delete;
  PackBMatrix& operator=(const PackBMatrix&) = delete;

 private:
  void* packed_weights_ = nullptr;
  size_t input_channels_;
  size_t output_channels_;
};

int qnnpackLinearDynamic(size_t batch_size, size_t input_channels, size_t output_channels, uint8_t input_zero_point,
                         const uint8_t* kernel_zero_points, const float* dequantization_scales, const uint8_t* input,
                         size_t input_stride, void* packed_weights, const float* bias, float* output,
                         size_t output_stride, pthreadpool* threadpool);

}  // namespace qnnpack

namespace octet {
namespace {

// 512 * 255 * 127 = 16580... < 2**24 = 16777216, so a panel's sum is an exact float32.
constexpr int64_t kPanel = 512;
static_assert(kPanel * 255 * 127 < (1 << 24));

class QnnpackPacked final : public PackedGemm {
 public:
  QnnpackPacked(const int8_t* weight, int64_t n, int64_t k)
      // QNNPACK reads scales and zero points in groups of 8, past the last channel.
      : PackedGemm(weight, n, k), zero_points_(n + 16, 128), ones_(n + 16, 1.0f), zeros_(n + 16, 0.0f) {
    const std::vector<int32_t> bias(n, 0);
    for (int64_t k0 = 0; k0 < k; k0 += kPanel) {
      const int64_t depth = std::min(kPanel, k - k0);
      std::vector<uint8_t> shifted(n * depth);
      for (int64_t j = 0; j < n; ++j)
        for (int64_t i = 0; i < depth; ++i) shifted[j * depth + i] = static_cast<uint8_t>(weight[j * k + k0 + i] + 128);
      panels_.push_back(std::make_unique<qnnpack::PackBMatrix>(depth, n, zero_points_.data(), ones_.data(),
                                                               shifted.data(), bias.data()));
      panel_bytes_ += (n + 7) / 8 * 8 * ((depth + 1) / 2 * 2 + static_cast<int64_t>(sizeof(int32_t)));
    }
  }

  void run(const uint8_t* x, int64_t ldx, int64_t m, int32_t* acc, int64_t ldacc, int thread,
           int threads) const override {
    // One output row is the smallest share: QNNPACK takes no range of outputs.
    const int64_t first = m * thread / threads, last = m * (thread + 1) / threads;
    if (first == last) return;
    std::vector<float> sums((last - first) * n() + 16);
    for (size_t panel = 0; panel < panels_.size(); ++panel) {
      const int64_t k0 = static_cast<int64_t>(panel) * kPanel;
      const int status = qnnpack::qnnpackLinearDynamic(
          last - first, std::min(kPanel, k() - k0), n(), 0, zero_points_.data(), ones_.data(), x + first * ldx + k0,
          ldx, panels_[panel]->getPackedWeights(), zeros_.data(), sums.data(), n(), nullptr);
      if (status != 0) throw std::runtime_error("QNNPACK's linear failed with status " + std::to_string(status));
      for (int64_t i = first; i < last; ++i) {
        int32_t* out = acc + i * ldacc;
        const float* in = sums.data() + (i - first) * n();
        if (panel == 0)
          for (int64_t j = 0; j < n(); ++j) out[j] = static_cast<int32_t>(in[j]);
        else
          for (int64_t j = 0; j < n(); ++j) out[j] += static_cast<int32_t>(in[j]);
      }
    }
  }

  std::string route() const override { return panels_.size() > 1 ? "wide, in panels of 512" : "wide"; }

 private:
  int64_t packed_bytes() const override {
    const size_t by_output = zero_points_.size() + (ones_.size() + zeros_.size()) * sizeof(float);
    return panel_bytes_ + static_cast<int64_t>(by_output);
  }

  std::vector<uint8_t> zero_points_;
  std::vector<float> ones_, zeros_;
  std::vector<std::unique_ptr<qnnpack::PackBMatrix>> panels_;
  // At most: QNNPACK does not say. Its kernels take outputs by 4 or 8 with a bias each, and inputs by 1 or 2.
  int64_t panel_bytes_ = 0;
};

}  // namespace

std::unique_ptr<PackedGemm> pack_qnnpack(const int8_t* weight, int64_t n, int64_t k) {
  return std::make_unique<QnnpackPacked>(weight, n, k);
}

std::string why_not_qnnpack() {
  static const int status = pytorch_qnnp_initialize();
  return status == 0 ? "" : "QNNPACK could not initialise on this CPU (status " + std::to_string(status) + ")";
}

}  // namespace octet

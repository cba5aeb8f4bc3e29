// A cache of packed weights, keyed by the plain int8 tensor.
//
// A layer holds its int8 weight only; the first call packs it for this machine, and later calls look it up here. So
// deepcopy, pickle, state_dict, torch.export and concurrent threads see plain tensors only. An entry is dropped when the
// tensor's storage dies (at the next packing), and packed again when the tensor's version shows a write.
//
// A write that changes no version is not seen: through `weight.data`, through NumPy, or to a tensor created under
// torch.inference_mode. kernels/README.md says what to do instead.
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/util/string_view.h>

#include <memory>

#include "core/conv/conv.h"
#include "core/gemm/packed_gemm.h"

namespace octet {

// weight: int8 (n, k), contiguous, on the CPU; or narrow (kernels/narrow.py), of one scale per output, which our own kernels
// multiply whatever the backend. backend: "native", "fbgemm" or "qnnpack"; "" is the default here.
std::shared_ptr<const PackedGemm> packed(const at::Tensor& weight, c10::string_view backend);

// A weight of a layer, as bytes or narrow (kernels/narrow.py), and its scale: undefined where the weight has scales by group, and
// then `gemm` is a GroupedGemm.
struct Weight {
  std::shared_ptr<const PackedGemm> gemm;
  at::Tensor scale;
};
Weight packed_weight(const at::Tensor& weight, const at::Tensor& scale, const char* name, c10::string_view backend);

// As `packed`, for group `group` of `groups` of a convolution's weight, int8 (out, channels / groups, *kernel): packed as
// (out / groups, ConvShape::k()), the channels last, as the gathered rows of activations have them.
std::shared_ptr<const PackedGemm> packed_conv(const at::Tensor& weight, int64_t group, int64_t groups,
                                              c10::string_view backend);

// The weight of a depthwise convolution, int8 (channels, 1, *kernel).
std::shared_ptr<const PackedDepthwise> packed_depthwise(const at::Tensor& weight);

// The weight of a 3 x 3 convolution, int8 (outputs, channels, [1,] 3, 3), for Winograd's algorithm; null where the backend
// has no such kernel.
std::shared_ptr<const PackedWinograd> packed_winograd(const at::Tensor& weight, c10::string_view backend);

// Inference tensors keep no version, so writes to them cannot be seen.
inline uint32_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

// The number of packed weights in the cache.
int64_t packed_count();

// Bytes of the packed weights in the cache that were made of a tensor in the memory of one of these; each once.
int64_t packed_bytes(at::TensorList weights);

}  // namespace octet

// The operators between reals and integers: quantise, dequantise, requantise, and whether all values are finite.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "core/cpu/transpose.h"
#include "core/rows/rows.h"
#include "torch/operands.h"

namespace octet {
namespace {

// Element by element, so the memory format stays: `tensor` as it lies where it lies without gaps, else a plain copy.
Tensor dense(const Tensor& tensor, at::ScalarType dtype, const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " is ", tensor.scalar_type(), ", expected ", dtype);
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}

Tensor quantize_op(const Tensor& x, double scale, int64_t zero_point) {
  const Tensor input = dense(x, at::kFloat, "input");
  Tensor q = at::empty_like(input, input.options().dtype(at::kByte));
  row_kernels().quantize(input.const_data_ptr<float>(), nullptr, input.numel(),
                         {static_cast<float>(scale), checked_byte(zero_point, "zero_point")}, 255,
                         q.mutable_data_ptr<uint8_t>(), nullptr);
  return q;
}

bool all_finite_op(const Tensor& x) {
  TORCH_CHECK_VALUE(x.is_cpu(), "input is on ", x.device(), ", expected the CPU");
  const Tensor input = dense(x, at::kFloat, "input");
  return row_kernels().all_finite(input.const_data_ptr<float>(), input.numel());
}

// Separates the interleaved channels of one sample, and dequantises them.
void dequantize_planes(const uint8_t* q, int64_t channels, int64_t pixels, float scale, int32_t zero_point, float* out) {
  uint8_t rows[kTileChannels * kTilePixels];
  each_tile(pixels, channels, [&](int64_t begin, int64_t n, int64_t first, int64_t count) {
    transpose(q + begin * channels + first, channels, n, count, rows, kTilePixels);
    for (int64_t c = 0; c < count; ++c)
      row_kernels().dequantize(rows + c * kTilePixels, n, scale, zero_point, out + (first + c) * pixels + begin);
  });
}

Tensor dequantize_op(const Tensor& q, double scale, int64_t zero_point) {
  TORCH_CHECK_TYPE(q.scalar_type() == at::kByte, "q is ", q.scalar_type(), ", expected Byte");
  const int32_t zero = checked_byte(zero_point, "zero_point");
  const Tensor input = q.dim() >= 4 && q.movedim(1, -1).is_contiguous() ? q : q.contiguous();
  Tensor x = at::empty(q.sizes(), q.options().dtype(at::kFloat));
  if (!input.is_contiguous()) {
    const int64_t sample = q.numel() / q.size(0), pixels = sample / q.size(1);
    for (int64_t n = 0; n < q.size(0); ++n)
      dequantize_planes(input.const_data_ptr<uint8_t>() + n * sample, q.size(1), pixels, static_cast<float>(scale),
                        zero, x.mutable_data_ptr<float>() + n * sample);
    return x;
  }
  row_kernels().dequantize(input.const_data_ptr<uint8_t>(), input.numel(), static_cast<float>(scale), zero,
                           x.mutable_data_ptr<float>());
  return x;
}

Tensor requantize_op(const Tensor& sums, const Tensor& multiplier, int64_t zero_point, int64_t quant_min,
                     int64_t quant_max) {
  const Tensor input = checked(sums, at::kInt, "sums");
  const Tensor factors = checked(multiplier, at::kFloat, "multiplier").reshape({-1});
  const int64_t n = factors.numel() == 1 ? input.numel() : factors.numel();
  TORCH_CHECK_VALUE(multiplier.dim() <= 1 && (factors.numel() == 1 || (input.dim() >= 1 && input.size(-1) == n)),
                    "multiplier has shape ", multiplier.sizes(), ", expected () or the last dimension of sums ",
                    sums.sizes());
  const int32_t zero = checked_byte(zero_point, "zero_point"), bottom = checked_byte(quant_min, "quant_min"),
                top = checked_byte(quant_max, "quant_max");
  TORCH_CHECK_VALUE(bottom <= top, "quant_min is ", bottom, ", above quant_max, ", top);
  Tensor q = at::empty(sums.sizes(), sums.options().dtype(at::kByte));
  for (int64_t first = 0; first < input.numel(); first += n)
    row_kernels().requantize(input.const_data_ptr<int32_t>() + first, factors.const_data_ptr<float>(),
                             factors.numel() == 1 ? 0 : 1, n, zero, bottom, top, q.mutable_data_ptr<uint8_t>() + first);
  return q;
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("quantize", &Defined<&quantize_op>::call);
  m.impl("dequantize", &Defined<&dequantize_op>::call);
  m.impl("requantize", &Defined<&requantize_op>::call);
}

TORCH_LIBRARY_FRAGMENT(octet_native, m) { m.def("all_finite(Tensor x) -> bool", &Defined<&all_finite_op>::call); }

}  // namespace octet

// Checks of an operator's tensors: dtypes and sizes; makes them contiguous.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <utility>
#include <vector>

#include "core/gemm/packed_gemm.h"

namespace octet {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// torch takes None for a tensor, which has no memory then, and no sizes that a check would find wrong.
inline void check_defined(const Tensor& tensor) { TORCH_CHECK_TYPE(tensor.defined(), "an operand is None, expected a tensor"); }
inline void check_defined(at::TensorList tensors) {
  for (const Tensor& one : tensors) check_defined(one);
}
template <class T>
inline void check_defined(const T&) {}

// An operator whose tensors are there; those that may be left out are OptionalTensors.
template <auto Operator>
struct Defined;
template <class Result, class... Arguments, Result (*Operator)(Arguments...)>
struct Defined<Operator> {
  static Result call(Arguments... arguments) {
    (check_defined(arguments), ...);
    return Operator(std::forward<Arguments>(arguments)...);
  }
};

inline Tensor checked(const Tensor& tensor, at::ScalarType dtype, const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " is ", tensor.scalar_type(), ", expected ", dtype);
  return tensor.contiguous();
}

// A contiguous float32 vector of `size`, or an undefined tensor for none.
inline Tensor vector(const OptionalTensor& tensor, int64_t size, const char* name, at::ScalarType dtype = at::kFloat) {
  if (!tensor || !tensor->defined()) return {};
  TORCH_CHECK_VALUE(tensor->dim() == 1 && tensor->size(0) == size, name, " has shape ", tensor->sizes(), ", expected (",
                    size, ",)");
  return checked(*tensor, dtype, name);
}

template <class T>
inline const T* data(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

inline void check_features(const Tensor& x, const PackedGemm& gemm) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == gemm.k(), "input has shape ", x.sizes(), ", expected (..., ", gemm.k(),
                    ") (in_features)");
}

inline std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last) {
  std::vector<int64_t> out(sizes.begin(), sizes.end());
  out.back() = last;
  return out;
}

// Not at::empty, whose way through the dispatcher costs a small layer 0.1 us of 3.
inline Tensor empty_reals(at::IntArrayRef shape) { return at::detail::empty_cpu(shape, at::kFloat); }

inline int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return rows;
}

// A zero point or bound of uint8 values. Kernels add it as int16, and another number would come out wrong.
inline int32_t checked_byte(int64_t value, const char* name) {
  TORCH_CHECK_VALUE(value >= 0 && value <= 255, name, " is ", value, ", expected 0 to 255");
  return static_cast<int32_t>(value);
}

// Limits of integers that are computed with as float32.
inline void check_limits(int64_t quant_min, int64_t quant_max) {
  constexpr int64_t kMost = int64_t{1} << 24;
  TORCH_CHECK_VALUE(-kMost <= quant_min && quant_min < quant_max && quant_max <= kMost, "quant_min is ", quant_min,
                    " and quant_max ", quant_max, ", expected two numbers from -2**24 to 2**24, the smaller one first");
}

inline void check_bits(int64_t bits) {
  TORCH_CHECK_VALUE(bits == 8 || bits == 16, "activation_bits is ", bits, ", expected 8 or 16");
}

}  // namespace octet

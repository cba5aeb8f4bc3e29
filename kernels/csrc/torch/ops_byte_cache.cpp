// The operators of keys and values that are kept as int8 (core/rows/byte_cache.h).
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>

#include "core/rows/byte_cache.h"
#include "core/rows/reals.h"
#include "torch/errors.h"
#include "torch/operands.h"

namespace octet {
namespace {

using at::Tensor;

// Of keys, whose tensor has five dimensions, or of values.
struct CacheShape {
  int64_t batch, heads, capacity, width;
  bool blocked;
};

CacheShape cache_shape(const Tensor& cache, const Tensor& scale, const char* name) {
  const bool blocked = cache.dim() == 5;
  TORCH_CHECK_TYPE(cache.scalar_type() == at::kChar && scale.scalar_type() == at::kFloat, name, " is ", cache.scalar_type(),
                   " and its scale ", scale.scalar_type(), ", expected Char and Float");
  TORCH_CHECK_VALUE((cache.dim() == 4 || (blocked && cache.size(4) == kKeysOfBlock)) && cache.is_contiguous(), name, " has shape ",
                    cache.sizes(), ", expected contiguous (batch, heads, capacity, width), or (batch, heads, blocks, width, ",
                    kKeysOfBlock, ") of keys");
  const CacheShape kept{cache.size(0), cache.size(1), cache.size(2) * (blocked ? kKeysOfBlock : 1), cache.size(3), blocked};
  TORCH_CHECK_VALUE(scale.dim() == 3 && scale.size(0) == kept.batch && scale.size(1) == kept.heads &&
                        scale.size(2) == kept.capacity && scale.is_contiguous(),
                    "the scale of ", name, " has shape ", scale.sizes(), ", expected contiguous (", kept.batch, ", ", kept.heads, ", ",
                    kept.capacity, ")");
  return kept;
}

void write_byte_cache_op(const Tensor& x, int64_t start, Tensor& cache, Tensor& scale) {
  const CacheShape kept = cache_shape(cache, scale, "cache");
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, "x is ", x.scalar_type(), ", expected Float");
  TORCH_CHECK_VALUE(x.dim() == 4 && x.size(0) == kept.batch && x.size(1) == kept.heads && x.size(3) == kept.width, "x has shape ",
                    x.sizes(), ", expected (", kept.batch, ", ", kept.heads, ", tokens, ", kept.width, ")");
  const int64_t tokens = x.size(2);
  TORCH_CHECK_VALUE(start >= 0 && start <= kept.capacity && tokens <= kept.capacity - start, tokens, " tokens from place ", start,
                    " on do not fit a cache of ", kept.capacity);
  if (x.numel() == 0) return;
  const Tensor rows = x.stride(3) == 1 ? x : x.contiguous();
  for (int64_t b = 0; b < kept.batch; ++b) {
    const CacheWrite write{rows.const_data_ptr<float>() + b * rows.stride(0), rows.stride(1), rows.stride(2), kept.heads, tokens,
                           kept.width, kept.capacity, start, kept.blocked};
    write.to(cache.mutable_data_ptr<int8_t>() + b * kept.heads * kept.capacity * kept.width,
             scale.mutable_data_ptr<float>() + b * kept.heads * kept.capacity);
  }
}

Tensor attend_byte_cache_op(const Tensor& q, const Tensor& keys, const Tensor& key_scale, const Tensor& values,
                            const Tensor& value_scale, int64_t length, double scale, bool causal, const OptionalTensor& mask) {
  const CacheShape key = cache_shape(keys, key_scale, "keys"), value = cache_shape(values, value_scale, "values");
  TORCH_CHECK_VALUE(key.blocked && !value.blocked && key.batch == value.batch && key.heads == value.heads &&
                        key.capacity == value.capacity,
                    "keys have shape ", keys.sizes(), " and values ", values.sizes(), ", expected (batch, heads, blocks, width, ",
                    kKeysOfBlock, ") and (batch, heads, ", kKeysOfBlock, " * blocks, width)");
  TORCH_CHECK_TYPE(q.scalar_type() == at::kFloat, "q is ", q.scalar_type(), ", expected Float");
  TORCH_CHECK_VALUE(q.dim() == 4 && q.size(0) == key.batch && key.heads > 0 && q.size(1) % key.heads == 0 && q.size(3) == key.width,
                    "q has shape ", q.sizes(), ", expected (", key.batch, ", a multiple of ", key.heads, " heads, queries, ", key.width, ")");
  TORCH_CHECK_VALUE(length > 0 && length <= key.capacity, "length is ", length, ", expected 1 to ", key.capacity);
  TORCH_CHECK_VALUE(std::isfinite(scale), "scale is ", scale, ", expected a finite number");
  TORCH_CHECK_VALUE(!causal || q.size(2) <= length, q.size(2), " queries are causal, and the cache has ", length, " keys");
  Tensor out = at::empty({q.size(0), q.size(1), q.size(2), value.width}, q.options());
  if (out.numel() == 0) return out;
  const Tensor queries = q.contiguous();
  CacheAttention by{queries.const_data_ptr<float>(), keys.const_data_ptr<int8_t>(), values.const_data_ptr<int8_t>(),
                    key_scale.const_data_ptr<float>(), value_scale.const_data_ptr<float>(), key.batch, key.heads,
                    q.size(1) / key.heads, q.size(2), key.width, value.width, key.capacity, length, static_cast<float>(scale),
                    causal, nullptr, 0, 0, 0, 0};
  Tensor added;
  if (mask && mask->defined()) {
    TORCH_CHECK_TYPE(mask->scalar_type() == at::kFloat, "mask is ", mask->scalar_type(), ", expected Float");
    TORCH_CHECK_VALUE(at::is_expandable_to(mask->sizes(), {q.size(0), q.size(1), q.size(2), length}), "mask has shape ",
                      mask->sizes(), ", expected one that fits (", q.size(0), ", ", q.size(1), ", ", q.size(2), ", ", length, ")");
    added = mask->expand({q.size(0), q.size(1), q.size(2), length});
    by.mask = added.const_data_ptr<float>();
    by.mask_batch = added.stride(0), by.mask_head = added.stride(1), by.mask_query = added.stride(2), by.mask_key = added.stride(3);
  }
  translated("", [&] { by.to(out.mutable_data_ptr<float>()); });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("write_byte_cache", &Defined<&write_byte_cache_op>::call);
  m.impl("attend_byte_cache", &Defined<&attend_byte_cache_op>::call);
}

}  // namespace octet

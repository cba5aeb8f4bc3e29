// What the extension knows of itself; no tensor decides these, so they belong to no device.
#include <torch/library.h>

#include "core/cpu/isa.h"
#include "core/gemm/native_narrow.h"
#include "torch/libraries.h"
#include "torch/packed.h"

namespace octet {
namespace {

std::string isa_op() { return isa_name(isa()); }
std::string why_not_op(c10::string_view backend) { return library(backend).why_not(); }
std::string default_backend_op() { return library("").name; }
std::string route_op(const at::Tensor& q_weight, c10::string_view backend) {
  TORCH_CHECK_VALUE(q_weight.is_cpu(), "q_weight is on ", q_weight.device(), ", expected the CPU");
  if (q_weight.scalar_type() == at::kByte) return native_narrow().route;
  // A weight without columns may say that it has any number of rows, and none of them decides.
  const bool empty = q_weight.dim() == 2 && q_weight.size(1) == 0;
  return packed(empty ? q_weight.slice(0, 0, 1) : q_weight, backend)->route();
}

}  // namespace

TORCH_LIBRARY(octet_native, m) {
  m.def("isa() -> str", &isa_op);
  m.def("bad_isa_request() -> str", &bad_isa_request);
  m.def("isa_refusal() -> str", &isa_refusal);
  m.def("why_not(str backend) -> str", &why_not_op);
  m.def("default_backend() -> str", &default_backend_op);
  m.def("route(Tensor q_weight, str backend) -> str", &Defined<&route_op>::call);
  m.def("packed_count() -> int", &packed_count);
  m.def("packed_bytes(Tensor[] weights) -> int", &Defined<&packed_bytes>::call);
}

}  // namespace octet

// Defines the operators, so that a process without Python can load a graph that calls them.
#include <torch/library.h>

namespace octet {

TORCH_LIBRARY(octet, m) {
  m.set_python_module("quant.kernels.ops");  // has their shape functions
#define OCTET_OPERATOR(name, schema) m.def(#name schema);
#include "torch/schemas.inc"
#undef OCTET_OPERATOR
}

// No gradient goes through integers. Without this torch takes the operators for differentiable and warns in backward.
TORCH_LIBRARY_IMPL(octet, Autograd, m) {
#define OCTET_OPERATOR(name, schema) m.impl(#name, torch::CppFunction::makeFallthrough());
#include "torch/schemas.inc"
#undef OCTET_OPERATOR
}

}  // namespace octet

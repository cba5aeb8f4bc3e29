// The libraries that provide a GEMM: the core's own, and those inside libtorch_cpu.
#pragma once

#include <c10/util/string_view.h>

#include <memory>
#include <string>

#include "core/gemm/packed_gemm.h"

namespace octet {

// A row of libraries.inc. `pack` gives nullptr where the library does not exist on this architecture.
struct Library {
  const char* name;
  std::unique_ptr<PackedGemm> (*pack)(const int8_t* weight, int64_t n, int64_t k);
  std::string (*why_not)();  // "" where it can be used here, else the reason that it cannot
  bool own;                  // the core's, which has other kernels besides products
  int rank;                  // the least is the fastest
};

// By name; "" is the fastest one that is exact on this machine, or QUANT_BACKEND's. Another name is a ValueError.
const Library& library(c10::string_view name);

// A weight int8 (n, k), contiguous, in the library's form; a ValueError where it cannot be used here.
std::unique_ptr<PackedGemm> pack_by(const Library& library, const int8_t* weight, int64_t n, int64_t k);

}  // namespace octet

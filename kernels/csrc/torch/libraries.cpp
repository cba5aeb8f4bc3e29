#include "torch/libraries.h"

#include <c10/util/Exception.h>

#include <cstdlib>

#include "torch/errors.h"

namespace octet {

#define OCTET_LIBRARY(name, own, rank_x86, rank_arm)                                      \
  std::unique_ptr<PackedGemm> pack_##name(const int8_t* weight, int64_t n, int64_t k);    \
  std::string why_not_##name();
#include "torch/libraries.inc"
#undef OCTET_LIBRARY

std::string why_not_native() { return ""; }

namespace {

#if defined(__aarch64__)
#define OCTET_LIBRARY(name, own, rank_x86, rank_arm) {#name, &pack_##name, &why_not_##name, own, rank_arm},
#else
#define OCTET_LIBRARY(name, own, rank_x86, rank_arm) {#name, &pack_##name, &why_not_##name, own, rank_x86},
#endif
constexpr Library kLibraries[] = {
#include "torch/libraries.inc"
};
#undef OCTET_LIBRARY

// That of the least rank which can be used here.
const Library& fastest() {
  const Library* found = nullptr;
  for (const Library& one : kLibraries)
    if ((!found || one.rank < found->rank) && one.why_not().empty()) found = &one;
  TORCH_CHECK(found, "no compiled backend can be used on this CPU");
  return *found;
}

std::string names() {
  std::string all;
  for (const Library& one : kLibraries) all += std::string(all.empty() ? "" : ", ") + one.name;
  return all;
}

}  // namespace

const Library& library(c10::string_view name) {
  if (name.empty()) {
    static const Library& preferred = [&]() -> const Library& {
      const char* named = std::getenv("QUANT_BACKEND");
      return named && *named ? library(named) : fastest();
    }();
    return preferred;
  }
  for (const Library& candidate : kLibraries)
    if (name == candidate.name) return candidate;
  TORCH_CHECK_VALUE(false, "backend '", name, "' cannot serve a compiled, exported or scripted graph; those that can are ",
                    names());
}

std::unique_ptr<PackedGemm> pack_by(const Library& lib, const int8_t* weight, int64_t n, int64_t k) {
  const std::string reason = lib.why_not();
  TORCH_CHECK_VALUE(reason.empty(), "backend '", lib.name, "' cannot be used here: ", reason);
  // FBGEMM and QNNPACK leave the sums of no products as they find them; ours are 0.
  return translated("", [&] { return k == 0 ? pack_native(weight, n, k) : lib.pack(weight, n, k); });
}

}  // namespace octet

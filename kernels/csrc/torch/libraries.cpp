#include "torch/libraries.h"

#include <c10/util/Exception.h>

#include <cstdlib>

#include "torch/errors.h"

namespace octet {
namespace {

std::string why_not_native() { return ""; }

// In order of preference where no one chose.
#if defined(__aarch64__)
constexpr Library kLibraries[] = {{"qnnpack", &pack_qnnpack, &why_not_qnnpack},
                                  {"native", &pack_native, &why_not_native, true},
                                  {"fbgemm", &pack_fbgemm, &why_not_fbgemm}};
#else
constexpr Library kLibraries[] = {{"native", &pack_native, &why_not_native, true},
                                  {"fbgemm", &pack_fbgemm, &why_not_fbgemm},
                                  {"qnnpack", &pack_qnnpack, &why_not_qnnpack}};
#endif

}  // namespace

const Library& library(c10::string_view name) {
  if (name.empty()) {
    static const Library& preferred = [&]() -> const Library& {
      const char* named = std::getenv("QUANT_BACKEND");
      if (named && *named) return library(named);
      for (const Library& candidate : kLibraries)
        if (candidate.why_not().empty()) return candidate;
      TORCH_CHECK(false, "no compiled backend can be used on this CPU");
    }();
    return preferred;
  }
  for (const Library& candidate : kLibraries)
    if (name == candidate.name) return candidate;
  TORCH_CHECK_VALUE(false, "backend '", name, "' cannot serve a compiled, exported or scripted graph; native, fbgemm "
                    "and qnnpack can");
}

std::unique_ptr<PackedGemm> pack_by(const Library& lib, const int8_t* weight, int64_t n, int64_t k) {
  const std::string reason = lib.why_not();
  TORCH_CHECK_VALUE(reason.empty(), "backend '", lib.name, "' cannot be used here: ", reason);
  // FBGEMM and QNNPACK leave the sums of no products as they find them; ours are 0.
  return translated("", [&] { return k == 0 ? pack_native(weight, n, k) : lib.pack(weight, n, k); });
}

}  // namespace octet

// The one table of which kernels exist for which instruction set. Every room declares the function that asks it; this file
// defines them all. A hole is written `none` here, beside what serves instead, so that no family is missing by oversight.
#include <cstddef>
#include <iterator>

#include "core/conv/native_winograd.h"
#include "core/cpu/isa.h"
#include "core/depthwise/native_depthwise.h"
#include "core/gemm/native_gemm.h"
#include "core/rows/elementwise.h"
#include "core/rows/reals.h"
#include "core/rows/rows.h"

namespace octet {

// Each in a file of its family, named by its instruction set.
extern const NativeGemm kPortableGemm;
extern const RowKernels kPortableRows;
extern const ElementKernels kPortableElements;
extern const RealKernels kPortableReals;
#if defined(__x86_64__)
extern const NativeGemm kAvx2PairwiseGemm, kAvx2WideGemm, kAvxVnniGemm, kAvx512VnniGemm;
extern const NativeDepthwise kAvx2Depthwise, kAvxVnniDepthwise, kAvx512VnniDepthwise;
extern const NativeWinograd kAvx2Winograd, kAvxVnniWinograd, kAvx512VnniWinograd;
extern const RowKernels kAvx2Rows, kAvx512Rows;
extern const ElementKernels kAvx2Elements, kAvx512Elements;
extern const RealKernels kAvx2Reals, kAvx512Reals;
#elif defined(__aarch64__)
extern const NativeGemm kNeonGemm, kNeonDotGemm, kNeonI8mmGemm;
#endif

namespace {

// No kernels of this family: a depthwise convolution is RowKernels::depthwise pixel by pixel and then requantised, a 3 x 3
// convolution is a product of gathered rows, and every weight is multiplied by `gemm`.
constexpr std::nullptr_t none = nullptr;

struct Kernels {
  Isa isa;
  const NativeGemm* gemm;
  const NativeGemm* gemm_of_safe_pairs;  // for weights that pass pairs_fit_int16
  const NativeDepthwise* depthwise;
  const NativeWinograd* winograd;
  const RowKernels* rows;
  const ElementKernels* elementwise;
  const RealKernels* reals;
};

// What is the portable source on aarch64 is vectors of NEON's width: each of its three levels has the same.
constexpr Kernels kTable[] = {
#if defined(__x86_64__)
    // clang-format off
    {Isa::kAvx512Vnni, &kAvx512VnniGemm, none,               &kAvx512VnniDepthwise, &kAvx512VnniWinograd, &kAvx512Rows,   &kAvx512Elements,   &kAvx512Reals},
    {Isa::kAvxVnni,    &kAvxVnniGemm,    none,               &kAvxVnniDepthwise,    &kAvxVnniWinograd,    &kAvx2Rows,     &kAvx2Elements,     &kAvx2Reals},
    {Isa::kAvx2,       &kAvx2WideGemm,   &kAvx2PairwiseGemm, &kAvx2Depthwise,       &kAvx2Winograd,       &kAvx2Rows,     &kAvx2Elements,     &kAvx2Reals},
#elif defined(__aarch64__)
    {Isa::kNeonI8mm,   &kNeonI8mmGemm,   none,               none,                  none,                 &kPortableRows, &kPortableElements, &kPortableReals},
    {Isa::kNeonDot,    &kNeonDotGemm,    none,               none,                  none,                 &kPortableRows, &kPortableElements, &kPortableReals},
    {Isa::kNeon,       &kNeonGemm,       none,               none,                  none,                 &kPortableRows, &kPortableElements, &kPortableReals},
#endif
    {Isa::kPortable,   &kPortableGemm,   none,               none,                  none,                 &kPortableRows, &kPortableElements, &kPortableReals},
    // clang-format on
};

// The row of the level in use.
const Kernels& kernels() {
  static const Kernels& row = [&]() -> const Kernels& {
    for (const Kernels& one : kTable)
      if (one.isa == isa()) return one;
    return kTable[std::size(kTable) - 1];
  }();
  return row;
}

}  // namespace

const NativeGemm& native_gemm() { return *kernels().gemm; }
const NativeGemm* native_gemm_of_safe_pairs() { return kernels().gemm_of_safe_pairs; }
const NativeDepthwise* native_depthwise() { return kernels().depthwise; }
const NativeWinograd* native_winograd() { return kernels().winograd; }
const RowKernels& row_kernels() { return *kernels().rows; }
const ElementKernels& element_kernels() { return *kernels().elementwise; }
const RealKernels& real_kernels() { return *kernels().reals; }

}  // namespace octet

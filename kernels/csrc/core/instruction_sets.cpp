// Which kernels exist for which instruction set: the rows of core/cpu/instruction_sets.inc, and the functions by which the rooms
// ask for those in use. The rooms declare them; here is where the table is complete at compile time.
#include <cstddef>

#include "core/conv/native_winograd.h"
#include "core/cpu/isa.h"
#include "core/cpu/selection.h"
#include "core/depthwise/native_depthwise.h"
#include "core/gemm/native_gemm.h"
#include "core/gemm/native_narrow.h"
#include "core/rows/elementwise.h"
#include "core/rows/reals.h"
#include "core/rows/rows.h"

namespace octet {

// Tables that a row may name, each in a file of its family. The linker misses one that is named and not defined.
#define OCTET_INSTRUCTION_SET(level, ...)                           \
  extern const NativeGemm k##level##Gemm;                           \
  extern const NativeGemm k##level##PairwiseGemm;                   \
  extern const NativeGemm k##level##SignedGemm;                     \
  extern const NativeDepthwise k##level##Depthwise;                 \
  extern const NativeWinograd k##level##Winograd;                   \
  extern const RowKernels k##level##Rows;                           \
  extern const ElementKernels k##level##Elements;                   \
  extern const RealKernels k##level##Reals;                         \
  extern const NativeNarrow k##level##Narrow;
#include "core/cpu/instruction_sets.inc"

namespace {

constexpr std::nullptr_t none = nullptr;

// A family's kernels. Without a default, so that a row which leaves the family out does not compile.
template <class Kernels>
struct Perhaps {
  const Kernels* kernels;
  constexpr Perhaps(const Kernels* kernels) : kernels(kernels) {}
};
template <class Kernels>
struct Always : Perhaps<Kernels> {
  using Perhaps<Kernels>::Perhaps;
  Always(std::nullptr_t) = delete;
};

// A family of another table.
struct Elsewhere {
  template <class Kernels>
  constexpr Elsewhere(Kernels) {}
};

struct Families {
  Always<NativeGemm> gemm;
  Perhaps<NativeGemm> gemm_of_safe_pairs;  // for weights that pass pairs_fit_int16
  Perhaps<NativeGemm> gemm_of_symmetric;   // for weights of -127 to 127
  Perhaps<NativeDepthwise> depthwise;
  Perhaps<NativeWinograd> winograd;
  Always<RowKernels> rows;
  Always<ElementKernels> elementwise;
  Always<RealKernels> reals;
  Elsewhere narrow;
};

// A row as far as the program has its kernels.
constexpr Families here(std::string_view name, Families families) {
  if (!has_instruction_set(name))  // which isa() never is then
    return {.gemm = &kPortableGemm, .gemm_of_safe_pairs = none, .gemm_of_symmetric = none, .depthwise = none, .winograd = none,
            .rows = &kPortableRows, .elementwise = &kPortableElements, .reals = &kPortableReals, .narrow = none};
  if (!has_operation("conv_u8s8_u8") && !has_operation("conv_u8s8_f32")) families.depthwise = none, families.winograd = none;
  return families;
}

constexpr Families kFamilies[] = {
#define OCTET_INSTRUCTION_SET(level, name, chosen, needs, flags, ...) here(name, {__VA_ARGS__}),
#include "core/cpu/instruction_sets.inc"
};

#if !defined(OCTET_WITHOUT_NARROW)
// Apart, so that a program which packs no narrow weight has none of their kernels; or is compiled without them.
struct Narrow {
  Elsewhere gemm, gemm_of_safe_pairs, gemm_of_symmetric, depthwise, winograd, rows, elementwise, reals;
  Always<NativeNarrow> narrow;
};

constexpr Narrow kNarrow[] = {
#define OCTET_INSTRUCTION_SET(level, name, chosen, needs, flags, ...) Narrow{__VA_ARGS__},
#include "core/cpu/instruction_sets.inc"
};
#endif

const Families& in_use() {
  static const Families& row = kFamilies[static_cast<int>(isa())];
  return row;
}

}  // namespace

const NativeGemm& native_gemm() { return *in_use().gemm.kernels; }
const NativeGemm* native_gemm_of_safe_pairs() { return in_use().gemm_of_safe_pairs.kernels; }
const NativeGemm* native_gemm_of_symmetric() { return in_use().gemm_of_symmetric.kernels; }
const NativeDepthwise* native_depthwise() { return in_use().depthwise.kernels; }
const NativeWinograd* native_winograd() { return in_use().winograd.kernels; }
const RowKernels& row_kernels() { return *in_use().rows.kernels; }
const ElementKernels& element_kernels() { return *in_use().elementwise.kernels; }
#if !defined(OCTET_WITHOUT_NARROW)
const NativeNarrow& native_narrow() { return *kNarrow[static_cast<int>(isa())].narrow.kernels; }
#endif
const RealKernels& real_kernels() { return *in_use().reals.kernels; }

}  // namespace octet

#include "core/cpu/isa.h"

#include <cstdlib>
#include <cstring>
#include <iterator>

#include "core/cpu/selection.h"
#include "core/cpu/tile_permission.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace octet {
namespace {

// Whether a CPU that has an instruction set chooses it, or only QUANT_ISA does.
enum class Chosen { by_cpu, by_request };

struct InstructionSet {
  const char* name;
  Isa isa;
  Chosen chosen;
  uint32_t needs;
};

constexpr InstructionSet row(const char* name, Isa isa, Chosen chosen, uint32_t needs) { return {name, isa, chosen, needs}; }

using namespace cpu_feature;
using enum Chosen;

constexpr InstructionSet kSets[] = {
#define OCTET_INSTRUCTION_SET(level, name, chosen, needs, ...) row(name, Isa::k##level, chosen, needs),
#include "core/cpu/instruction_sets.inc"
};

#if defined(__x86_64__)
enum Register { eax, ebx, ecx, edx };

// The registers that the system saves, as bits of XCR0; none where it does not say.
uint64_t saved_registers() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low | static_cast<uint64_t>(high) << 32;
}

// Not __builtin_cpu_supports: g++ 12's does not know AVX-VNNI.
bool cpu_has(unsigned leaf, unsigned subleaf, Register where, int bit, uint64_t saved) {
  unsigned registers[4];
  return __get_cpuid_count(leaf, subleaf, &registers[eax], &registers[ebx], &registers[ecx], &registers[edx]) &&
         (registers[where] >> bit & 1) && (saved_registers() & saved) == saved;
}
#elif defined(__aarch64__) && defined(__linux__)
bool cpu_has(unsigned long word, int bit) { return getauxval(word) >> bit & 1; }
#elif defined(__aarch64__)
enum { AT_HWCAP, AT_HWCAP2 };
// Every 64-bit ARM CPU has the first, asimd; there is no portable query for the others.
bool cpu_has(int word, int bit) { return word == AT_HWCAP && bit == 1; }
#endif

uint32_t find_features() {
  uint32_t features = any_cpu;
#define OCTET_CPU_FEATURE(name, ...) \
  if (cpu_has(__VA_ARGS__)) features |= name;
#include "core/cpu/instruction_sets.inc"
  return features;
}

// The features of a set that this CPU lacks, or its system does not save, each behind a space.
std::string missing_features(const InstructionSet& set) {
  [[maybe_unused]] static const uint32_t features = find_features();
  std::string missing;
#define OCTET_CPU_FEATURE(name, ...) \
  if (set.needs & name & ~features) missing += " " #name;
#include "core/cpu/instruction_sets.inc"
  return missing;
}

// Why this process cannot use a set, in words, or "". Asks the system for what it gives on request.
std::string why_not(const InstructionSet& set) {
  if (!has_instruction_set(set.name)) return "this program was built without it";
  if (const std::string missing = missing_features(set); !missing.empty()) return "this CPU, or its system, lacks" + missing;
#if defined(__x86_64__)
  if (set.needs & amx_tile) return ask_for_tiles();
#endif
  return "";
}

const char* requested() {
  const char* name = std::getenv("QUANT_ISA");
  return name ? name : "";
}

const InstructionSet& choose() {
  const InstructionSet* best = kSets;
  for (const InstructionSet& set : kSets) {
    const bool asked = std::strcmp(requested(), set.name) == 0;
    if ((asked || set.chosen == by_cpu) && why_not(set).empty()) best = &set;
    if (asked) break;
  }
  return *best;
}

const InstructionSet& in_use() {
  static const InstructionSet& chosen = choose();
  return chosen;
}

}  // namespace

Isa isa() { return in_use().isa; }

bool isa_needs(uint32_t features) { return (in_use().needs & features) == features; }

const char* isa_name(Isa isa) { return kSets[static_cast<int>(isa)].name; }

std::string bad_isa_request() {
  if (!*requested()) return "";
  std::string expected;
  for (size_t i = 0; i < std::size(kSets); ++i) {
    if (std::strcmp(requested(), kSets[i].name) == 0) return "";
    expected += std::string(i == 0 ? "" : i + 1 < std::size(kSets) ? ", " : " or ") + kSets[i].name;
  }
  return std::string("QUANT_ISA is '") + requested() + "', expected " + expected;
}

std::string isa_refusal() {
  for (const InstructionSet& set : kSets) {
    const bool asked = std::strcmp(requested(), set.name) == 0;
    if (asked && set.isa != isa()) return std::string("QUANT_ISA is '") + set.name + "', and " + why_not(set);
    // What the CPU has and would choose, and the system does not give.
    if (!*requested() && set.chosen == by_cpu && set.isa > isa() && missing_features(set).empty())
      return std::string(set.name) + ": " + why_not(set);
  }
  return "";
}

}  // namespace octet

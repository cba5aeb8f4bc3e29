// Which instructions this process may use: what the CPU has, lowered by QUANT_ISA for tests.
#pragma once

#include <cstdint>
#include <string>

namespace octet {

// The instruction sets of this architecture, in the order of instruction_sets.inc.
enum class Isa {
#define OCTET_INSTRUCTION_SET(level, ...) k##level,
#include "core/cpu/instruction_sets.inc"
};

// Features of CPUs of this architecture, a bit each: sets of them are added by |.
namespace cpu_feature {

enum Place {
#define OCTET_CPU_FEATURE(name, ...) place_of_##name,
#include "core/cpu/instruction_sets.inc"
};

constexpr uint32_t any_cpu = 0;
#define OCTET_CPU_FEATURE(name, ...) constexpr uint32_t name = 1u << place_of_##name;
#include "core/cpu/instruction_sets.inc"

}  // namespace cpu_feature

// The set in use, fixed at the first call: the best of this CPU, or of those up to QUANT_ISA where that is set.
Isa isa();
// Whether the set in use needs all of these features.
bool isa_needs(uint32_t features);
const char* isa_name(Isa isa);
// The error in the value of QUANT_ISA, in words; "" where it is unset or an instruction set of this architecture.
std::string bad_isa_request();
// The reason that the set named by QUANT_ISA, or without one the best that this CPU has, is not in use, in words; "" where it is.
std::string isa_refusal();

}  // namespace octet

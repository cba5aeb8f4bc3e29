// Which instructions this process may use: what the CPU has, lowered by QUANT_ISA for tests.
#pragma once

#include <string>

namespace octet {

// Those of one architecture are ordered by speed.
enum class Isa { kPortable, kAvx2, kAvxVnni, kAvx512Vnni, kNeon, kNeonDot, kNeonI8mm };

// The level in use, fixed at the first call: the best of this CPU, or of those up to QUANT_ISA where that is set.
Isa isa();
const char* isa_name(Isa isa);
// What is wrong with the value of QUANT_ISA, in words; "" where it is unset or a level of this architecture.
std::string bad_isa_request();

}  // namespace octet

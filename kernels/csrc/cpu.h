// Which instructions this process may use: what the CPU has, lowered by QUANT_ISA for tests.
#pragma once

namespace octet {

// Ordered by speed; a level includes the ones before it, but for kAvx512Vnni, which need not include kAvxVnni. On
// aarch64 only kPortable exists so far.
enum class Isa { kPortable, kAvx2, kAvxVnni, kAvx512Vnni };

// The level in use, fixed at the first call: the CPU's, or QUANT_ISA (portable, avx2, avxvnni, avx512vnni) if lower.
Isa isa();
const char* isa_name(Isa isa);
// The value of QUANT_ISA where it is set and is no level, else "".
const char* bad_isa_request();

}  // namespace octet

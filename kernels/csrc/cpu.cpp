#include "cpu.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace octet {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avxvnni", "avx512vnni"};

bool has_avxvnni() {
#if defined(__x86_64__)
  // g++ 12's __builtin_cpu_supports does not know "avxvnni": CPUID.(EAX=7,ECX=1):EAX[4].
  unsigned eax = 7, ebx = 0, ecx = 1, edx = 0;
  __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  return eax & (1u << 4);
#else
  return false;
#endif
}

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!avx2) return Isa::kPortable;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    return Isa::kAvx512Vnni;
  return has_avxvnni() ? Isa::kAvxVnni : Isa::kAvx2;
#else
  return Isa::kPortable;
#endif
}

const char* requested() {
  const char* name = std::getenv("QUANT_ISA");
  return name ? name : "";
}

Isa choose() {
  const Isa best = detect();
  for (int level = 0; level < 4; ++level) {
    if (std::strcmp(requested(), kNames[level]) != 0) continue;
    const Isa lowered = std::min(best, static_cast<Isa>(level));
    // Ice Lake servers have the 512-bit VNNI and not the 256-bit one.
    return lowered == Isa::kAvxVnni && !has_avxvnni() ? Isa::kAvx2 : lowered;
  }
  return best;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

const char* bad_isa_request() {
  for (const char* name : kNames)
    if (std::strcmp(requested(), name) == 0) return "";
  return requested();
}

}  // namespace octet

#include "core/cpu/isa.h"

#include <cstdlib>
#include <cstring>
#include <iterator>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace octet {
namespace {

struct Level {
  const char* name;
  Isa isa;
  bool (*usable)();
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avxvnni() {
  // g++ 12's __builtin_cpu_supports does not know "avxvnni": CPUID.(EAX=7,ECX=1):EAX[4].
  unsigned eax = 7, ebx = 0, ecx = 1, edx = 0;
  __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  return has_avx2() && (eax & (1u << 4));
}

// Ice Lake servers have the 512-bit VNNI and not the 256-bit one.
bool has_avx512vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

constexpr Level kLevels[] = {{"portable", Isa::kPortable, &always},
                             {"avx2", Isa::kAvx2, &has_avx2},
                             {"avxvnni", Isa::kAvxVnni, &has_avxvnni},
                             {"avx512vnni", Isa::kAvx512Vnni, &has_avx512vnni}};
#elif defined(__aarch64__)
// Linux's own numbers (arch/arm64/include/uapi/asm/hwcap.h): older headers lack the second.
[[maybe_unused]] constexpr unsigned long kDotProduct = 1ul << 20, kInt8MatrixProduct = 1ul << 13;

bool has_dot() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & kDotProduct;
#else
  return false;
#endif
}

bool has_i8mm() {
#if defined(__linux__)
  return has_dot() && (getauxval(AT_HWCAP2) & kInt8MatrixProduct);
#else
  return false;
#endif
}

constexpr Level kLevels[] = {{"portable", Isa::kPortable, &always},
                             {"neon", Isa::kNeon, &always},
                             {"neondot", Isa::kNeonDot, &has_dot},
                             {"neoni8mm", Isa::kNeonI8mm, &has_i8mm}};
#else
constexpr Level kLevels[] = {{"portable", Isa::kPortable, &always}};
#endif

const char* requested() {
  const char* name = std::getenv("QUANT_ISA");
  return name ? name : "";
}

Isa choose() {
  Isa best = Isa::kPortable;
  for (const Level& level : kLevels) {
    if (level.usable()) best = level.isa;
    if (std::strcmp(requested(), level.name) == 0) break;
  }
  return best;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* isa_name(Isa isa) {
  for (const Level& level : kLevels)
    if (level.isa == isa) return level.name;
  return "";
}

std::string bad_isa_request() {
  if (!*requested()) return "";
  std::string expected;
  for (size_t i = 0; i < std::size(kLevels); ++i) {
    if (std::strcmp(requested(), kLevels[i].name) == 0) return "";
    expected += std::string(i == 0 ? "" : i + 1 < std::size(kLevels) ? ", " : " or ") + kLevels[i].name;
  }
  return std::string("QUANT_ISA is '") + requested() + "', expected " + expected;
}

}  // namespace octet

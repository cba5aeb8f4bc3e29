#include "core/cpu/tile_permission.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#endif

namespace octet {
namespace {

#if defined(__x86_64__) && defined(__linux__)
// Linux's asm/prctl.h of 5.16, and XCR0's bit of the tiles' data.
constexpr long kGetPermission = 0x1022, kRequestPermission = 0x1023, kTileData = 18;

// Palette 1 of CPUID: eight tiles of 16 rows of 64 bytes, which the kernels are written for.
bool has_palette() {
  unsigned a, b, c, d;
  return __get_cpuid_count(0x1d, 1, &a, &b, &c, &d) && (b & 0xffff) == 64 && b >> 16 >= 8 && (c & 0xffff) == 16;
}

std::string ask() {
  if (!has_palette()) return "this CPU's tiles are not eight of 16 rows of 64 bytes";
  // Refused with ENOSPC where a thread has a signal stack too small for tiles, and by kernels and containers without the call.
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0)
    return std::string("the system refuses tiles (arch_prctl: ") + std::strerror(errno) + "; Linux gives them from 5.16 on)";
  unsigned long granted = 0;
  if (syscall(SYS_arch_prctl, kGetPermission, &granted) != 0 || !(granted >> kTileData & 1))
    return "the system has not given the tiles that it was asked for";
  return "";
}
#else
std::string ask() { return "tiles are asked for on Linux on x86-64 only"; }
#endif

}  // namespace

const std::string& ask_for_tiles() {
  static const std::string answer = ask();
  return answer;
}

}  // namespace octet

#include "crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define OCTET_CRC32_INSTRUCTION
#endif

namespace octet {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320;
constexpr int kSlices = 16;

using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// tables[k][byte]: what a byte adds to the remainder when k more bytes follow it.
Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ (rest & 1 ? kPolynomial : 0);
    tables[0][byte] = rest;
  }
  for (int k = 1; k < kSlices; ++k)
    for (int byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = before >> 8 ^ tables[0][before & 255];
    }
  return tables;
}

// Made at the first call, in 10 microseconds: in the program they would be 1 % of it.
const Tables& tables_of_all() {
  static const Tables tables = make_tables();
  return tables;
}

// The remainder after more bytes, sixteen a round: one by one would take ten times as long as reading the file.
uint32_t by_tables(uint32_t rest, const uint8_t* at, size_t size) {
  const Tables& tables = tables_of_all();
  for (; size >= kSlices; size -= kSlices, at += kSlices) {
    uint32_t next = 0;
    for (int i = 0; i < kSlices; ++i) {
      const uint8_t byte = i < 4 ? at[i] ^ static_cast<uint8_t>(rest >> 8 * i) : at[i];
      next ^= tables[kSlices - 1 - i][byte];
    }
    rest = next;
  }
  for (; size; --size, ++at) rest = rest >> 8 ^ tables[0][(rest ^ *at) & 255];
  return rest;
}

#if defined(__x86_64__)
constexpr size_t kFolded = 64;  // bytes of a round of `folded`

// x**(d + 32) and x**(d - 32) modulo the polynomial, bits reversed: what moves the halves of 16 bytes d bits on.
struct Step {
  long long low, high;
};
constexpr Step kBy512 = {0x154442bd4, 0x1c6e41596}, kBy128 = {0x1751997d0, 0x0ccaa009e};

__attribute__((target("pclmul,sse4.1"))) inline __m128i moved(__m128i part, Step step, __m128i next) {
  const __m128i by = _mm_set_epi64x(step.high, step.low);
  return _mm_xor_si128(next, _mm_xor_si128(_mm_clmulepi64_si128(part, by, 0x00), _mm_clmulepi64_si128(part, by, 0x11)));
}

// Sixteen bytes with the same remainder as `rest` and rounds * 64 bytes, by products without carries (Gopal et al., Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ, Intel 2009). At least one round.
__attribute__((target("pclmul,sse4.1"))) void folded(uint32_t rest, const uint8_t* at, size_t rounds, uint8_t* result) {
  const auto load = [&](int place) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + place);
  };
  __m128i parts[4] = {_mm_xor_si128(load(0), _mm_cvtsi32_si128(static_cast<int>(rest))), load(1), load(2), load(3)};
  for (; --rounds;) {
    at += kFolded;
    for (int i = 0; i < 4; ++i) parts[i] = moved(parts[i], kBy512, load(i));
  }
  for (int i = 1; i < 4; ++i) parts[i] = moved(parts[i - 1], kBy128, parts[i]);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(result), parts[3]);
}

uint32_t remainder_of(uint32_t rest, const uint8_t* at, size_t size) {
  if (size < 2 * kFolded || !__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) return by_tables(rest, at, size);
  uint8_t same[16];
  folded(rest, at, size / kFolded, same);
  return by_tables(by_tables(0, same, sizeof same), at + size / kFolded * kFolded, size % kFolded);
}
#elif defined(OCTET_CRC32_INSTRUCTION)
__attribute__((target("+crc"))) uint32_t by_instruction(uint32_t rest, const uint8_t* at, size_t size) {
  for (; size >= 8; size -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    rest = __crc32d(rest, word);
  }
  for (; size; --size, ++at) rest = __crc32b(rest, *at);
  return rest;
}

uint32_t remainder_of(uint32_t rest, const uint8_t* at, size_t size) {
  return getauxval(AT_HWCAP) & HWCAP_CRC32 ? by_instruction(rest, at, size) : by_tables(rest, at, size);
}
#else
uint32_t remainder_of(uint32_t rest, const uint8_t* at, size_t size) { return by_tables(rest, at, size); }
#endif

}  // namespace

uint32_t crc32(const void* bytes, size_t size) { return ~remainder_of(~0u, static_cast<const uint8_t*>(bytes), size); }

}  // namespace octet

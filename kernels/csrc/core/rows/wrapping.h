#pragma once
#include <cstdint>

namespace octet {

// Sums that leave their type wrap, as they do in vectors: without signs, since C++ does not define it with them.

// A bias may be any int32. Always inline: sources of every instruction set have it.
inline __attribute__((always_inline)) int32_t wrapped_sum(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

// A counter that is full wraps, as torch's does, whoever has altered it.
inline void add_to(int64_t& counter, int64_t more) {
  counter = static_cast<int64_t>(static_cast<uint64_t>(counter) + static_cast<uint64_t>(more));
}

}  // namespace octet

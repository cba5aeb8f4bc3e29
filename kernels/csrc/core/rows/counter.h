#pragma once
#include <cstdint>

namespace octet {

// A counter that is full wraps, as torch's does, whoever has altered it.
inline void add_to(int64_t& counter, int64_t more) {
  counter = static_cast<int64_t>(static_cast<uint64_t>(counter) + static_cast<uint64_t>(more));
}

}  // namespace octet

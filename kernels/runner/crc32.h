// CRC-32 as zlib's and zip's, by which damage to a file is noticed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octet {

uint32_t crc32(const void* bytes, size_t size);

}  // namespace octet

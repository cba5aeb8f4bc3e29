#include "core/cpu/memory.h"

#include <cstdio>
#include <cstring>

namespace octet {
namespace {

constexpr const char* kWords = "out of memory";

// Its text is in itself: there may be no memory for a string.
class NoMemory final : public std::bad_alloc {
 public:
  NoMemory(size_t bytes, const char* what) noexcept {
    std::snprintf(text_, sizeof text_, "%s: the system has no %zu bytes for %s", kWords, bytes, what);
  }
  NoMemory(const char* where, const char* why) noexcept { std::snprintf(text_, sizeof text_, "%s%s", where, why); }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[160];
};

}  // namespace

void throw_no_memory(size_t bytes, const char* what) { throw NoMemory(bytes, what); }

void throw_no_memory(const char* where, const std::bad_alloc& error) { throw NoMemory(where, words_of(error)); }

// By its text: the runner is compiled without the names of types.
const char* words_of(const std::bad_alloc& error) { return std::strstr(error.what(), kWords) ? error.what() : kWords; }

}  // namespace octet

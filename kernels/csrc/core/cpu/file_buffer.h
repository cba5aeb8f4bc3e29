// Memory that only grows, for files of one instruction set. A std::vector there would leave its functions to the linker, compiled for
// that set, and the linker keeps one of each for all files, on every CPU. Nothing here is seen outside the file.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "core/cpu/memory.h"

namespace octet {
namespace {

template <class T>
class FileBuffer {
 public:
  FileBuffer() = default;
  FileBuffer(const FileBuffer&) = delete;
  FileBuffer& operator=(const FileBuffer&) = delete;
  ~FileBuffer() { std::free(memory_); }

  // Room for `count`; what was in it before is gone where it has to grow.
  T* get(int64_t count) {
    if (count > count_) {
      std::free(memory_);
      memory_ = std::malloc(count * sizeof(T));
      count_ = memory_ ? count : 0;
      if (!memory_) throw_no_memory(count * sizeof(T), "intermediate values");
    }
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace
}  // namespace octet

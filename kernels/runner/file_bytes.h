// The bytes of a file, mapped into memory where the system can; or a copy of some that are in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace octet {

class FileBytes {
 public:
  // Raises std::invalid_argument with the system's reason where the file cannot be read.
  explicit FileBytes(const std::string& path);
  FileBytes(const void* bytes, size_t size);
  ~FileBytes();
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<uint8_t[]> copy_;  // null where the file is mapped
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace octet

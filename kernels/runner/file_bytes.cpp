#include "file_bytes.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace octet {
namespace {

struct Handle {
  int number;
  ~Handle() {
    if (number >= 0) close(number);
  }
};

}  // namespace

FileBytes::FileBytes(const std::string& path) {
  const Handle file{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  struct stat about;
  if (file.number < 0 || fstat(file.number, &about) < 0) throw std::invalid_argument("cannot read " + path + ": " + std::strerror(errno));
  if (!S_ISREG(about.st_mode)) throw std::invalid_argument("cannot read " + path + ": it is no file");
  size_ = static_cast<size_t>(about.st_size);
  if (!size_) return;
  int flags = MAP_PRIVATE;
#if defined(MAP_POPULATE)
  flags |= MAP_POPULATE;  // all of it is read at once: one call instead of a fault a page
#endif
  void* const mapped = mmap(nullptr, size_, PROT_READ, flags, file.number, 0);
  if (mapped == MAP_FAILED) throw std::invalid_argument("cannot read " + path + ": " + std::strerror(errno));
  data_ = static_cast<const uint8_t*>(mapped);
}

FileBytes::FileBytes(const void* bytes, size_t size) : copy_(new uint8_t[size]), data_(copy_.get()), size_(size) {
  std::memcpy(copy_.get(), bytes, size);
}

FileBytes::~FileBytes() {
  if (data_ && !copy_) munmap(const_cast<uint8_t*>(data_), size_);
}

}  // namespace octet

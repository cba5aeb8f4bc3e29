#include "npy.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace npy {
namespace {

constexpr char kMagic[] = "\x93NUMPY";
constexpr size_t kMagicSize = 6;

struct Type {
  const char* word;
  octet_dtype dtype;
  int64_t bytes;
};

constexpr Type kTypes[] = {{"<f4", OCTET_FLOAT32, 4}, {"|u1", OCTET_UINT8, 1}, {"|b1", OCTET_BOOL, 1}, {"<i8", OCTET_INT64, 8}};

const Type& type_of(octet_dtype dtype) {
  for (const Type& type : kTypes)
    if (type.dtype == dtype) return type;
  throw std::logic_error("a tensor of no known type");
}

// The text behind a key of the header's dictionary.
std::string_view entry(std::string_view header, std::string_view key) {
  const size_t found = header.find(std::string("'") + std::string(key) + "':");
  if (found == std::string_view::npos) throw std::runtime_error("its header has no " + std::string(key));
  header.remove_prefix(found + key.size() + 3);
  while (header.starts_with(' ')) header.remove_prefix(1);
  return header;
}

const Type& read_type(std::string_view header) {
  const std::string_view text = entry(header, "descr");
  for (const Type& type : kTypes)
    if (text.substr(1).starts_with(std::string(type.word) + "'")) return type;
  throw std::runtime_error("its type is " + std::string(text.substr(0, text.find(','))) + ", expected '<f4', '|u1', '|b1' or '<i8'");
}

std::vector<int64_t> read_shape(std::string_view header) {
  std::string_view text = entry(header, "shape");
  if (!text.starts_with('(')) throw std::runtime_error("its header has a damaged shape");
  std::vector<int64_t> sizes;
  for (text.remove_prefix(1); !text.starts_with(')');) {
    int64_t size = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
    if (error != std::errc() || size < 0) throw std::runtime_error("its header has a damaged shape");
    sizes.push_back(size);
    text.remove_prefix(end - text.data());
    while (text.starts_with(',') || text.starts_with(' ')) text.remove_prefix(1);
    if (text.empty()) throw std::runtime_error("its header has a damaged shape");
  }
  if (sizes.size() > OCTET_MOST_DIMENSIONS) throw std::runtime_error("it has more than 8 dimensions");
  return sizes;
}

Array parse(std::vector<uint8_t> bytes) {
  if (bytes.size() < 12 || std::memcmp(bytes.data(), kMagic, kMagicSize) != 0) throw std::runtime_error("it is no .npy file");
  const bool is_first_version = bytes[kMagicSize] == 1;  // whose length has 2 bytes; later ones have 4
  const size_t begin = is_first_version ? 10 : 12;
  size_t length = bytes[8] | static_cast<size_t>(bytes[9]) << 8;
  if (!is_first_version) length |= static_cast<size_t>(bytes[10]) << 16 | static_cast<size_t>(bytes[11]) << 24;
  if (length > bytes.size() - begin) throw std::runtime_error("it was cut");
  const std::string_view header(reinterpret_cast<const char*>(bytes.data()) + begin, length);
  const Type& type = read_type(header);
  const std::vector<int64_t> sizes = read_shape(header);
  const bool first_fastest = entry(header, "fortran_order").starts_with("True");

  Array array;
  array.tensor.dtype = type.dtype, array.tensor.rank = static_cast<int32_t>(sizes.size());
  // Without values strides are of no use, and other sizes may be as large as they like.
  int64_t count = std::find(sizes.begin(), sizes.end(), 0) == sizes.end() ? 1 : 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t d = first_fastest ? i : sizes.size() - 1 - i;
    array.tensor.sizes[d] = sizes[d], array.tensor.strides[d] = count;
    if (sizes[d] && count > static_cast<int64_t>(bytes.size()) / sizes[d]) throw std::runtime_error("it was cut");
    count *= sizes[d];
  }
  if (count * type.bytes > static_cast<int64_t>(bytes.size() - begin - length)) throw std::runtime_error("it was cut");
  bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(begin + length));  // so that the elements are aligned
  if (bytes.empty()) bytes.resize(1);
  array.values = std::move(bytes);
  array.tensor.data = array.values.data();
  return array;
}

// Files of the C library: streams of C++ read and write byte by byte.
struct Close {
  void operator()(FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<FILE, Close>;

std::runtime_error cannot(const char* what, const std::string& path) {
  const int number = errno;
  return std::runtime_error(std::string("cannot ") + what + " " + path + (number ? std::string(": ") + std::strerror(number) : ""));
}

// Whether a file takes its place by a rename: what is there and is no file, a pipe or a device, is written as it is.
bool is_replaced(const std::string& path) {
  struct stat about;
  return stat(path.c_str(), &about) != 0 || S_ISREG(about.st_mode);
}

std::vector<uint8_t> read_file(const std::string& path) {
  errno = 0;
  const File file(std::fopen(path.c_str(), "rb"));
  if (!file || std::fseek(file.get(), 0, SEEK_END) != 0) throw cannot("read", path);
  const long size = std::ftell(file.get());
  std::rewind(file.get());
  std::vector<uint8_t> bytes(std::max(size, 0L));
  if (size < 0 || std::fread(bytes.data(), 1, bytes.size(), file.get()) != bytes.size()) throw cannot("read", path);
  return bytes;
}

}  // namespace

Array read_npy(const std::string& path) {
  std::vector<uint8_t> bytes = read_file(path);
  try {
    return parse(std::move(bytes));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

void allocate(octet_tensor& tensor, std::vector<uint8_t>& values) {
  int64_t last = 0, count = 1;
  for (int d = 0; d < tensor.rank; ++d) last += (tensor.sizes[d] - 1) * tensor.strides[d], count *= tensor.sizes[d];
  values.assign(count ? (last + 1) * type_of(tensor.dtype).bytes : 1, 0);
  tensor.data = values.data();
}

void write_npy(const std::string& path, const octet_tensor& tensor) {
  const Type& type = type_of(tensor.dtype);
  std::string header = std::string("{'descr': '") + type.word + "', 'fortran_order': False, 'shape': (";
  int64_t count = 1;
  for (int d = 0; d < tensor.rank; ++d) header += std::to_string(tensor.sizes[d]) + ",", count *= tensor.sizes[d];
  header += "), }";
  while ((10 + header.size() + 1) % 64) header += ' ';
  header += '\n';
  std::vector<char> bytes(count * type.bytes);  // in the order of the header, whatever the strides
  const char* const data = static_cast<const char*>(tensor.data);
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, place = 0;
    for (int d = tensor.rank; d-- > 0; rest /= tensor.sizes[d]) place += rest % tensor.sizes[d] * tensor.strides[d];
    std::memcpy(bytes.data() + i * type.bytes, data + place * type.bytes, type.bytes);
  }
  const unsigned char begin[] = {1, 0, static_cast<unsigned char>(header.size() & 255), static_cast<unsigned char>(header.size() >> 8)};
  // One fixed name: what a killed process left is overwritten by the next.
  const std::string partial = is_replaced(path) ? path + ".partial" : path;
  errno = 0;
  File file(std::fopen(partial.c_str(), "wb"));
  const auto write = [&](const void* from, size_t size) { return std::fwrite(from, 1, size, file.get()) == size; };
  if (file && write(kMagic, kMagicSize) && write(begin, sizeof begin) && write(header.data(), header.size()) &&
      write(bytes.data(), bytes.size()) && std::fclose(file.release()) == 0 &&
      (partial == path || std::rename(partial.c_str(), path.c_str()) == 0))
    return;
  const std::runtime_error error = cannot("write", path);
  if (partial != path) std::remove(partial.c_str());
  throw error;
}

}  // namespace npy

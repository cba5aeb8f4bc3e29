// Arrays in files of numpy's format .npy, of the types that models take.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "octet.h"

namespace npy {

struct Array {
  octet_tensor tensor{};       // its data is that of `values`
  std::vector<uint8_t> values;
};

// Raise std::runtime_error, which names the file.
Array read_npy(const std::string& path);
void write_npy(const std::string& path, const octet_tensor& tensor);

// Memory for a tensor by its sizes and strides, which becomes its data.
void allocate(octet_tensor& tensor, std::vector<uint8_t>& values);

}  // namespace npy

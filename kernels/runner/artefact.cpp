#include "artefact.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>

#include "crc32.h"
#include "json.h"
#include "octet.h"

namespace octet {
namespace {

// Keys in the metadata of the file, as quant/artefact/file.py writes them.
constexpr const char* kManifest = "octet";
constexpr const char* kDocument = "octet_runner";
constexpr const char* kDocumentSum = "octet_runner_crc32";

[[noreturn]] void fail(const std::string& why) { throw std::invalid_argument(why); }

// A type of elements: its names in safetensors and in plans, and its bytes.
struct ElementType {
  const char *stored, *name;
  int64_t bytes;
};

constexpr ElementType kTypes[] = {{"I8", "int8", 1}, {"U8", "uint8", 1}, {"I32", "int32", 4}, {"F32", "float32", 4}};

struct StoredTensor {
  const uint8_t* data;
  int64_t bytes;
  const ElementType* type;  // null where no plan has constants of it
  Sizes sizes;
};

Sizes read_sizes(const Json& entry, const char* what) {
  Sizes sizes;
  for (const Json& one : entry.array(what)) sizes.push_back(one.integer(what));
  return sizes;
}

// The elements of a tensor; refuses sizes below 0, and those whose product no memory holds.
int64_t count_of(const Sizes& sizes, const std::string& what) {
  constexpr int64_t kMost = int64_t{1} << 40;
  int64_t count = 1;
  for (const int64_t size : sizes) {
    if (size < 0 || (size > 0 && count > kMost / size)) fail(what + " has impossible sizes");
    count *= size;
  }
  return count;
}

// A tensor of the header, whose bytes are inside of `data` and as many as its sizes say.
StoredTensor read_tensor(const std::string& name, const Json& entry, std::string_view data) {
  const std::string what = "tensor '" + name + "'";
  const Sizes range = read_sizes(entry.at("data_offsets"), "data_offsets");
  if (range.size() != 2 || range[0] < 0 || range[1] < range[0]) fail(what + " has damaged offsets");
  if (range[1] > static_cast<int64_t>(data.size())) fail(what + " lies behind the end of the file: it was cut");
  StoredTensor tensor{reinterpret_cast<const uint8_t*>(data.data()) + range[0], range[1] - range[0], nullptr,
                      read_sizes(entry.at("shape"), "shape")};
  const std::string& stored = entry.at("dtype").string("dtype");
  for (const ElementType& type : kTypes)
    if (stored == type.stored) tensor.type = &type;
  const int64_t count = count_of(tensor.sizes, what);
  if (tensor.type && tensor.bytes != count * tensor.type->bytes)
    fail(what + " has " + std::to_string(tensor.bytes) + " bytes, expected " + std::to_string(count * tensor.type->bytes));
  return tensor;
}

using Tensors = std::map<std::string, StoredTensor, std::less<>>;

Tensors read_tensors(const Json& header, std::string_view data) {
  Tensors tensors;
  for (const auto& [name, entry] : header.object("the header"))
    if (name != "__metadata__") tensors.emplace(name, read_tensor(name, entry, data));
  return tensors;
}

// Under `make fuzz-runner` every checksum matches: what an altered file does behind it is what is tried there.
#if defined(FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION)
bool matches(const void*, size_t, int64_t) { return true; }
#else
bool matches(const void* bytes, size_t size, int64_t sum) { return crc32(bytes, size) == sum; }
#endif

// A number of the metadata, whose values are strings.
int64_t read_number(const std::string& text) {
  const bool is_number = !text.empty() && text.size() < 12 && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  return is_number ? std::stoll(text) : -1;
}

// The runner's part of the metadata, parsed.
Json read_document(const Json& header) {
  const Json* metadata = header.find("__metadata__");
  if (!metadata || !metadata->find(kManifest)) fail("it is a safetensors file that quant.save did not write");
  const Json* text = metadata->find(kDocument);
  if (!text) fail("it has no part for the runner: write it by quant.save(model, path, runner=True)");
  const std::string& document = text->string(kDocument);
  if (!matches(document.data(), document.size(), read_number(metadata->at(kDocumentSum).string(kDocumentSum))))
    fail("it was altered or damaged: the runner's part does not match its checksum");
  Json parsed = Json::parse(document);
  const int64_t version = parsed.at("version").integer("version");
  if (version < 1 || version > kFileVersion)
    fail("its part for the runner has version " + std::to_string(version) + " (" + parsed.at("writer").string("writer") +
         "), this library reads up to " + std::to_string(kFileVersion) + ": upgrade it");
  return parsed;
}

PlanConstant read_constant(const Json& entry, const Tensors& tensors) {
  const std::string& name = entry.at("tensor").string("tensor");
  const auto found = tensors.find(name);
  if (found == tensors.end()) fail("it lacks the tensor '" + name + "'");
  const StoredTensor& tensor = found->second;
  const std::string& dtype = entry.at("dtype").string("dtype");
  const Sizes sizes = read_sizes(entry.at("shape"), "shape");
  if (!tensor.type || dtype != tensor.type->name)
    fail("tensor '" + name + "' is " + (tensor.type ? tensor.type->name : "of another type") + ", expected " + dtype);
  if (sizes != tensor.sizes) fail("tensor '" + name + "' has sizes " + shown(tensor.sizes) + ", expected " + shown(sizes));
  if (reinterpret_cast<uintptr_t>(tensor.data) % tensor.type->bytes) fail("tensor '" + name + "' is not aligned to its elements");
  return {tensor.data, dtype, sizes};
}

// Names of inputs and outputs end in errors and in files: no byte of theirs moves a cursor.
std::string read_name(const Json& entry) {
  const std::string& name = entry.string("a name");
  for (const char sign : name)
    if (static_cast<unsigned char>(sign) < 32) fail("a name has a control character");
  return name;
}

ModelValue read_value(const Json& entry) {
  ModelValue value{read_name(entry.at("name")), entry.at("dtype").string("dtype"), !entry.at("shape").is_null(),
                   entry.at("fixed_rank").boolean("fixed_rank"), {}};
  if (value.dtype != "float32" && value.dtype != "uint8" && value.dtype != "bool" && value.dtype != "int64")
    fail("'" + value.name + "' is " + value.dtype + ", expected float32, uint8, bool or int64");
  if (!value.has_shape) return value;
  for (const Json& one : entry.at("shape").array("shape")) value.sizes.push_back(one.is_string() ? -1 : one.integer("shape"));
  if (value.sizes.size() > OCTET_MOST_DIMENSIONS)
    fail("'" + value.name + "' has " + std::to_string(value.sizes.size()) + " dimensions, expected at most " +
         std::to_string(OCTET_MOST_DIMENSIONS));
  return value;
}

// Compares each constant's bytes with its checksum. On this thread alone: one reads as fast as the memory gives, and others would be
// woken before the caller has said how many there may be.
void check_sums(const std::vector<Json>& entries, const Tensors& tensors) {
  for (const Json& entry : entries) {
    const std::string& name = entry.at("tensor").string("tensor");
    const StoredTensor& stored = tensors.find(name)->second;
    if (!matches(stored.data, stored.bytes, entry.at("crc32").integer("crc32")))
      fail("it was altered or damaged: tensor '" + name + "' does not match its checksum");
  }
}

Artefact read_checked(const uint8_t* bytes, size_t size) {
  uint64_t length = 0;
  if (size < sizeof length) fail("it is too short for a safetensors file");
  for (size_t i = 0; i < sizeof length; ++i) length |= static_cast<uint64_t>(bytes[i]) << 8 * i;
  if (length < 2 || length > size - sizeof length) fail("it is no safetensors file, or it was cut");
  const char* const text = reinterpret_cast<const char*>(bytes) + sizeof length;
  const auto header_size = static_cast<size_t>(length);
  const Json header = Json::parse({text, header_size});
  const Tensors tensors = read_tensors(header, {text + header_size, size - sizeof length - header_size});
  const Json document = read_document(header);

  Artefact artefact{document.at("plan").string("plan"), {}, {}, {}, {}};
  for (const Json& name : document.at("steps").array("steps")) artefact.steps.push_back(read_name(name));
  const std::vector<Json>& constants = document.at("constants").array("constants");
  for (const Json& entry : constants) artefact.constants.push_back(read_constant(entry, tensors));
  for (const Json& entry : document.at("inputs").array("inputs")) artefact.inputs.push_back(read_value(entry));
  for (const Json& entry : document.at("outputs").array("outputs")) artefact.outputs.push_back(read_value(entry));
  check_sums(constants, tensors);
  return artefact;
}

}  // namespace

std::string shown(const Sizes& sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + (sizes[i] < 0 ? "any" : std::to_string(sizes[i]));
  return text + ")";
}

Artefact read_artefact(const uint8_t* bytes, size_t size, const std::string& name) {
  try {
    return read_checked(bytes, size);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(name + ": " + error.what());
  }
}

}  // namespace octet

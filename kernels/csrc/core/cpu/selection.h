// What a program has of the core: everything, or the operations and instruction sets that it was built for (`make runner FOR=...`).
// The linker then drops the kernels that nothing names.
#pragma once

#include <string_view>

namespace octet {

// Whether a list of words with spaces between them has a word.
constexpr bool has_word(std::string_view list, std::string_view word) {
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = list.find(' ', begin);
    if (list.substr(begin, end == list.npos ? end : end - begin) == word) return true;
    if (end == list.npos) break;
    begin = end + 1;
  }
  return false;
}

// Whether an operation of plans is here, by its name in their texts.
constexpr bool has_operation([[maybe_unused]] std::string_view name) {
#if defined(OCTET_OPERATIONS)
  return has_word(OCTET_OPERATIONS, name);
#else
  return true;
#endif
}

// Whether the kernels of an instruction set are here. The portable ones always are.
constexpr bool has_instruction_set([[maybe_unused]] std::string_view name) {
#if defined(OCTET_INSTRUCTION_SETS)
  return name == "portable" || has_word(OCTET_INSTRUCTION_SETS, name);
#else
  return true;
#endif
}

}  // namespace octet

// What is thrown where the system gives no memory: it says how much was wanted.
#pragma once

#include <cstddef>
#include <new>

namespace octet {

// Not inline: files of one instruction set throw it too, and the linker keeps one of each inline function for all files.
[[noreturn]] void throw_no_memory(size_t bytes, const char* what);

// The same with the place that failed before the words of `error`.
[[noreturn]] void throw_no_memory(const char* where, const std::bad_alloc& error);

// The words of an error about memory: the standard library's own say less than that.
const char* words_of(const std::bad_alloc& error);

}  // namespace octet

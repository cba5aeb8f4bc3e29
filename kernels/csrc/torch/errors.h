// Translates the core's errors, which are C++'s, into torch's: std::invalid_argument becomes a ValueError in Python,
// std::out_of_range an IndexError; std::bad_alloc, which torch makes a MemoryError, gets words.
#pragma once

#include <c10/util/Exception.h>

#include <stdexcept>
#include <utility>

#include "core/cpu/memory.h"

namespace octet {

// Returns fn(). An error's message begins with `where`.
template <class Fn>
decltype(auto) translated(const char* where, Fn&& fn) {
  try {
    return std::forward<Fn>(fn)();
  } catch (const std::bad_alloc& error) {
    throw_no_memory(where, error);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, where, error.what());
  } catch (const std::out_of_range& error) {
    TORCH_CHECK_INDEX(false, where, error.what());
  }
}

}  // namespace octet

// Errors of the core, which are C++'s own, as the ones that torch hands to Python: std::invalid_argument is a ValueError,
// std::out_of_range an IndexError.
#pragma once

#include <c10/util/Exception.h>

#include <stdexcept>
#include <utility>

namespace octet {

// What fn() returns. `where` stands before the message.
template <class Fn>
decltype(auto) translated(const char* where, Fn&& fn) {
  try {
    return std::forward<Fn>(fn)();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, where, error.what());
  } catch (const std::out_of_range& error) {
    TORCH_CHECK_INDEX(false, where, error.what());
  }
}

}  // namespace octet

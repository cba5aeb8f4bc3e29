// Loops that the compiler sees as written out, for kernels whose arrays must become registers.
#pragma once

#include <type_traits>
#include <utility>

namespace octet {

template <int I>
inline constexpr std::integral_constant<int, I> constant;

// fn(0), ..., fn(Count - 1), each with a constant of its own. A pragma that unrolls comes too late for that: g++ decides
// what an array is before it unrolls.
template <int Count, class Fn>
inline __attribute__((always_inline)) void each(Fn fn) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) { (fn(constant<I>), ...); }
  (std::make_integer_sequence<int, Count>{});
}

}  // namespace octet

// Counts the calls of one kernel of a table, and prints them when the process ends: that a plan ran, and by whose kernels.
#pragma once

#include <cstdio>

namespace octet::added {
namespace {

const char* family;  // each file of a family has its own
long calls = 0;

struct Report {
  ~Report() { std::fprintf(stderr, "added %s %s\n", family, calls > 0 ? "ran" : "did not run"); }
};

template <class Return, class... Arguments>
struct Counted {
  inline static Return (*original)(Arguments...);
  static Return call(Arguments... arguments) {
    ++calls;
    return original(arguments...);
  }
};

// `table` with a counter before the kernel `*member`.
template <class Table, class Return, class... Arguments>
Table counted(Table table, Return (*Table::*member)(Arguments...), const char* name) {
  static Report report;
  family = name;
  Counted<Return, Arguments...>::original = table.*member;
  table.*member = &Counted<Return, Arguments...>::call;
  return table;
}

}  // namespace
}  // namespace octet::added

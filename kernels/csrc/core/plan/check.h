// Checks the text of a plan against the table of operators with their settings, kinds and bounds, before anything is built
// from it: settings.inc, and the lines of core/rows/binary.inc. kernels/plan_check.py reads the same two for the reference.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/plan/text.h"

namespace octet {

// A field of the table: `name?` may be missing, `kind|-` may be nothing.
struct Setting {
  std::string name, kind;
  bool optional = false, nothing = false;
};

// Of an operation that the table has, in its order.
const std::vector<Setting>& settings_of(std::string_view operation);

// Raises std::invalid_argument, which quotes the line, for unknown operators and settings, settings that are missing or not
// of their kind, and registers that are read before they are written or written twice. Shapes are not known here.
void check_plan(const PlanText& text);

}  // namespace octet

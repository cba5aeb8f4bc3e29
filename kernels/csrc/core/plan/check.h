// Checks the text of a plan against the table of operators with their settings, kinds and bounds (settings.inc), before
// anything is built from it. kernels/plan_check.py reads the same table for the reference.
#pragma once

#include "core/plan/text.h"

namespace octet {

// Raises std::invalid_argument, which quotes the line, for unknown operators and settings, settings that are missing or not
// of their kind, and registers that are read before they are written or written twice. Shapes are not known here.
void check_plan(const PlanText& text);

}  // namespace octet

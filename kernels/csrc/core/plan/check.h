// What a plan's text may say: every operator with its settings, their kinds and bounds (settings.inc), checked before
// anything is built from it. kernels/plan_check.py reads the same table for the reference.
#pragma once

#include "core/plan/text.h"

namespace octet {

// Raises std::invalid_argument, which quotes the line: unknown operators and settings, settings that are missing or no value
// of their kind, registers that are read before they are written or written twice. Shapes are not known here.
void check_plan(const PlanText& text);

}  // namespace octet

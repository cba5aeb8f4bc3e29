// Padding with a constant that is not written out until somebody reads it: a convolution takes it into its own windows.
#pragma once

#include <optional>

#include "core/plan/ir.h"
#include "core/plan/views.h"

namespace octet {

class PlanBuilder;

struct PlanPad {
  PlanView source;
  Sizes before, after;  // per dimension, none negative
  int32_t fill;         // an integer, or the real zero

  // Whether it pads nothing but spatial dimensions.
  bool spatial() const;
};

// What an operation pads, where it is one that can wait: a constant pad, or the quantisation of a real one.
std::optional<PlanPad> pad_of(PlanBuilder& b, const Operation& operation);

// Written out.
PlanView padded(PlanBuilder& b, const PlanPad& pad);

}  // namespace octet

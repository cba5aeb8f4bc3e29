// Deferred padding with a constant: it is written only when an operation other than a convolution reads it, which applies it
// in its own windows.
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

  // Whether it pads spatial dimensions only.
  bool spatial() const;
};

// The padding of an operation that can be deferred: a constant pad, or the quantisation of a padded float.
std::optional<PlanPad> pad_of(PlanBuilder& b, const Operation& operation);

// Writes the padded tensor.
PlanView padded(PlanBuilder& b, const PlanPad& pad);

}  // namespace octet

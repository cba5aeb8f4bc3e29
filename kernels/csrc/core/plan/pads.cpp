#include "core/plan/pads.h"

#include <algorithm>

#include "core/gemm/workspace.h"
#include "core/plan/lower.h"

namespace octet {
namespace {

std::optional<PlanPad> constant_pad(PlanBuilder& b, const Operation& operation, const op::Pad& pad) {
  const PlanView& x = b.input(pad.q);
  expect(operation, !x.index, "its input is int64, expected uint8 or float32");
  Widths widths = widths_of(operation, pad, x);
  const auto cuts = [](const Sizes& ones) { return std::any_of(ones.begin(), ones.end(), [](int64_t one) { return one < 0; }); };
  if (pad.mode != op::PadMode::kConstant || cuts(widths.before) || cuts(widths.after)) return {};
  Sizes sizes = x.sizes;
  for (size_t d = 0; d < sizes.size(); ++d) sizes[d] += widths.before[d] + widths.after[d];
  checked_count(operation, sizes);
  return PlanPad{x, std::move(widths.before), std::move(widths.after), pad.fill};
}

template <class T>
void fill(PlanBuilder& b, const PlanView& view, T value) {
  const int64_t n = view.count();
  b.emit({}, view, [=](const PlanFrame& frame) {
    std::fill_n(reinterpret_cast<T*>(frame.buffers[view.buffer]), n, value);
  });
}

}  // namespace

bool PlanPad::spatial() const {
  return source.rank() >= 3 && before[0] + after[0] + before[1] + after[1] == 0;
}

std::optional<PlanPad> pad_of(PlanBuilder& b, const Operation& operation) {
  if (const op::Pad* pad = operation.as<op::Pad>()) return constant_pad(b, operation, *pad);
  const op::Quantize* quantize = operation.as<op::Quantize>();
  if (!quantize) return {};
  // The real zero is the zero point, so padding may as well come after rounding.
  const PlanPad* real = b.pad(quantize->x);
  if (!real || !real->source.real || real->fill != 0) return {};
  PlanPad pad = *real;
  pad.source = quantized(b, operation, *quantize, real->source);
  pad.fill = quantize->range.zero_point;
  return pad;
}

PlanView padded(PlanBuilder& b, const PlanPad& pad) {
  const PlanView& source = pad.source;
  Sizes sizes = source.sizes;
  for (size_t d = 0; d < sizes.size(); ++d) sizes[d] += pad.before[d] + pad.after[d];
  const bool plain = source.has_strides(plain_strides(source.sizes));
  const PlanView out = b.fresh(sizes, plain ? plain_strides(sizes) : channels_last_strides(sizes), source.real);
  if (source.real)
    fill(b, out, static_cast<float>(pad.fill));
  else
    fill(b, out, static_cast<uint8_t>(pad.fill));
  PlanView inside = out;
  inside.sizes = source.sizes;
  for (size_t d = 0; d < sizes.size(); ++d) inside.offset += pad.before[d] * out.strides[d];
  b.copy(source, inside);
  return out;
}

}  // namespace octet

#include "plan_pads.h"

#include <algorithm>

#include "plan_operators.h"
#include "workspace.h"

namespace octet {
namespace {

std::optional<PlanPad> constant_pad(PlanBuilder& b, const PlanLine& line) {
  const Sizes widths = line.integers("widths");
  const bool cuts = std::any_of(widths.begin(), widths.end(), [](int64_t width) { return width < 0; });
  if (line.word("mode") != "constant" || cuts) return {};
  PlanPad pad{b.input(line, "q"), {}, {}, byte(line, "fill")};
  const int64_t rank = pad.source.rank(), pairs = static_cast<int64_t>(widths.size()) / 2;
  expect(line, widths.size() % 2 == 0 && pairs <= rank, "its widths are not in pairs");
  pad.before.assign(rank, 0), pad.after.assign(rank, 0);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    pad.before[rank - 1 - pair] = widths[2 * pair];
    pad.after[rank - 1 - pair] = widths[2 * pair + 1];
  }
  return pad;
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

std::optional<PlanPad> pad_of(PlanBuilder& b, const PlanLine& line) {
  if (line.op == "pad") return constant_pad(b, line);
  if (line.op != "quantize") return {};
  // The real zero is the zero point, so padding may as well come after rounding.
  const PlanPad* real = b.pad(line.reg("x"));
  if (!real || !real->source.real || real->fill != 0) return {};
  PlanPad pad = *real;
  pad.source = quantized(b, line, real->source);
  pad.fill = byte(line, "zero_point");
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

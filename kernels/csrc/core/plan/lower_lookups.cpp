// Rows of tables, by indices.
#include <algorithm>
#include <stdexcept>

#include "core/cpu/threads.h"
#include "core/embedding/tables.h"
#include "core/plan/lower.h"

namespace octet {
namespace {

void copy_rows(const float* rows, int64_t dim, const int64_t* indices, int64_t n, float* out) {
  each_range(n, kBagsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::copy_n(rows + indices[i] * dim, dim, out + i * dim);
  });
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Embedding& by) {
  const PlanView x = b.plain(b.input(by.x));
  expect(operation, x.index, "its indices are not int64");
  const bool packed = by.bits != 0;
  const Sizes& rows = b.constant(operation, by.table, packed ? "rows" : "weight", packed ? "uint8" : "float32", 2).sizes;
  expect(operation, !packed || by.bits == 8 || (by.bits >= 2 && by.bits <= 4), "its values have not 8, 4, 3 or 2 bits");
  const int64_t dim = packed ? by.dim : rows[1], groups = packed ? table_groups(by.bits, dim, rows[1]) : 1;
  expect(operation, groups > 0, "its rows have another length");
  Sizes sizes = x.sizes;
  sizes.push_back(dim);
  checked_count(operation, sizes);
  const PlanView out = b.fresh(sizes, plain_strides(sizes), true);
  const std::shared_ptr<const void> table = b.weights().table(by.table);
  const Table how{static_cast<const uint8_t*>(table.get()), rows[0], rows[1], dim, static_cast<int>(by.bits), groups};
  b.emit({&x}, out, [=, n = x.count(), line = operation.text](const PlanFrame& frame) {
    const int64_t* indices = x.indices(frame);
    try {
      check_indices(indices, n, how.count);
    } catch (const std::out_of_range& error) {
      throw std::out_of_range("plan line '" + line + "': " + error.what());
    }
    if (how.bits)
      look_up(how, indices, n, out.reals_out(frame));
    else
      copy_rows(static_cast<const float*>(table.get()), dim, indices, n, out.reals_out(frame));
  });
  return out;
}

}  // namespace octet

// Products of two activations. The right one is packed in each call, as the weight of a layer is when it is converted: its integers
// less 128 are int8, and the products are those of the tables of core/gemm. With q_b' = q_b - 128 and z_b' = z_b - 128,
//
//     sum (q_a - z_a) (q_b' - z_b') = sum q_a q_b' - z_a sum q_b' - z_b' sum q_a + K z_a z_b',
//
// where sum q_b' belongs to a column of the result and sum q_a to a row. Where the whole may leave int32 it is added up in int64
// instead, in plain loops. reference_ops.matmul says what they mean.
#include <algorithm>
#include <cmath>

#include "core/cpu/of_thread.h"
#include "core/cpu/scratch.h"
#include "core/cpu/threads.h"
#include "core/cpu/transpose.h"
#include "core/gemm/native_gemm.h"
#include "core/plan/lower.h"
#include "core/rows/rows.h"

namespace octet {
namespace {

// Up to this K no part of a sum leaves int32; beyond it parts may, and only the whole has to fit.
constexpr int64_t kFits = 16384;
// As many products of two integers less their zero points, 255 * 255 each, add up in int32.
constexpr int64_t kPiece = 32768;

struct Room {
  Scratch<uint8_t> rows, turned;
  Scratch<int8_t> packed;
  Scratch<int32_t> sums, offset, ones;
  Scratch<float> scale;
};

Room& room() {
  thread_local Room* own = nullptr;
  return of_thread(own);
}

// Where the matrices of one batch begin, in elements.
struct Batch {
  int64_t a, b, out;
};

struct Product {
  int64_t m, n, k, lda, a_step, ldb, b_step, ldout;
  int32_t a_zero, b_zero;  // of b less 128
  float multiplier;
  bool real;
  int32_t zero_point, bottom, top;

  // Whether no sum leaves int32, whatever the factors hold.
  bool fits() const {
    const int64_t b_own = b_zero + 128, of_a = std::max(a_zero, 255 - a_zero), of_b = std::max(b_own, 255 - b_own);
    return k <= INT32_MAX / (of_a * of_b);
  }

  // b (k, n) as (n, k) less 128.
  const int8_t* turn(const uint8_t* b, Room& space) const {
    uint8_t* const turned = space.turned.get(n * k);
    if (ldb == 1)
      for (int64_t j = 0; j < n; ++j) std::copy_n(b + j * b_step, k, turned + j * k);
    else if (b_step == 1)
      transpose(b, ldb, k, n, turned, k);
    else
      for (int64_t j = 0; j < n; ++j)
        for (int64_t i = 0; i < k; ++i) turned[j * k + i] = b[i * ldb + j * b_step];
    for (int64_t i = 0; i < n * k; ++i) turned[i] ^= 0x80;
    return reinterpret_cast<const int8_t*>(turned);
  }

  // b turned and packed, and its sums as what is added to each column.
  const int8_t* pack(const uint8_t* b, Room& space) const {
    const int8_t* const values = turn(b, space);
    int32_t* const offset = space.offset.get(n);
    const uint32_t both = static_cast<uint32_t>(k) * static_cast<uint32_t>(a_zero) * static_cast<uint32_t>(b_zero);
    for (int64_t j = 0; j < n; ++j) {
      int32_t sum = 0;
      if (a_zero)
        for (int64_t i = 0; i < k; ++i) sum += values[j * k + i];
      offset[j] = static_cast<int32_t>(both - static_cast<uint32_t>(a_zero) * static_cast<uint32_t>(sum));
    }
    const NativeGemm& gemm = native_gemm();
    int8_t* const packed = space.packed.get(gemm.packed_bytes(n, k));
    gemm.pack(values, n, k, packed);
    return packed;
  }

  // The sum of a row of a, which is copied to where kernels may read past its end.
  int32_t take_row(const uint8_t* row, uint8_t* to) const {
    if (a_step == 1)
      std::copy_n(row, k, to);
    else
      for (int64_t i = 0; i < k; ++i) to[i] = row[i * a_step];
    uint32_t sum = 0;  // only of use where the sums fit
    if (b_zero)
      for (int64_t i = 0; i < k; ++i) sum += to[i];
    return static_cast<int32_t>(sum);
  }

  void finish(int32_t* sums, int32_t of_row, Room& space, uint8_t* bytes, float* reals) const {
    const uint32_t taken = static_cast<uint32_t>(b_zero) * static_cast<uint32_t>(of_row);
    const int32_t *ones = space.ones.get(n), *offset = space.offset.get(n);
    if (k > kFits)
      for (int64_t j = 0; j < n; ++j)
        sums[j] = static_cast<int32_t>(static_cast<uint32_t>(sums[j]) + static_cast<uint32_t>(offset[j]) - taken);
    else if (a_zero || b_zero)
      row_kernels().remove_zero_point(sums, static_cast<int32_t>(taken), ones, offset, n);
    if (real) {
      const Channels channels{n, ones, space.scale.get(n), nullptr};
      row_kernels().dequantize_sums(sums, nullptr, {multiplier, 0}, channels, false, reals);
    } else {
      row_kernels().requantize(sums, &multiplier, 0, n, zero_point, bottom, top, bytes);
    }
  }

  // One sum, of a row of a and a column of b.
  int64_t long_sum(const uint8_t* row, const int8_t* column) const {
    int64_t sum = 0;
    for (int64_t begin = 0; begin < k; begin += kPiece) {
      const int64_t end = std::min(k, begin + kPiece);
      int32_t piece = 0;
      for (int64_t i = begin; i < end; ++i) piece += (row[i] - a_zero) * (column[i] - b_zero);
      sum += piece;
    }
    return sum;
  }

  // `run` for sums that may leave int32. They are rounded to float once, as int32 sums are.
  void run_long(const uint8_t* a, const uint8_t* b, uint8_t* bytes, float* reals, int64_t first, int64_t last) const {
    Room& space = room();
    const int8_t* const columns = turn(b, space);
    uint8_t* const row = space.rows.get(k);
    const float zero = static_cast<float>(zero_point), low = static_cast<float>(bottom), high = static_cast<float>(top);
    for (int64_t i = first; i < last; ++i) {
      take_row(a + i * lda, row);
      for (int64_t j = 0; j < n; ++j) {
        const float product = static_cast<float>(long_sum(row, columns + j * k)) * multiplier;
        if (real)
          reals[i * ldout + j] = product;
        else
          bytes[i * ldout + j] = static_cast<uint8_t>(std::min(std::max(std::rint(product) + zero, low), high));
      }
    }
  }

  // Rows [first, last) of one batch.
  void run(const uint8_t* a, const uint8_t* b, uint8_t* bytes, float* reals, int64_t first, int64_t last) const {
    if (!fits()) return run_long(a, b, bytes, reals, first, last);
    Room& space = room();
    const NativeGemm& gemm = native_gemm();
    const int8_t* const packed = pack(b, space);
    std::fill_n(space.ones.get(n), n, 1);
    std::fill_n(space.scale.get(n), n, 1.0f);
    const int64_t ldx = padded_row(k), groups = (n + gemm.group - 1) / gemm.group;
    uint8_t* const rows = space.rows.get(kRowBlock * ldx);
    int32_t* const sums = space.sums.get(kRowBlock * n);
    int32_t of_rows[kRowBlock];
    for (int64_t begin = first; begin < last; begin += kRowBlock) {
      const int64_t count = std::min(kRowBlock, last - begin);
      for (int64_t i = 0; i < count; ++i) of_rows[i] = take_row(a + (begin + i) * lda, rows + i * ldx);
      gemm.run(rows, ldx, count, packed, n, k, sums, n, 0, groups, false);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = (begin + i) * ldout;
        finish(sums + i * n, of_rows[i], space, real ? nullptr : bytes + at, real ? reals + at : nullptr);
      }
    }
  }
};

// A view with `rank` dimensions, those before its own of size 1.
PlanView of_rank(PlanView view, size_t rank) {
  const size_t missing = rank - view.sizes.size();
  view.sizes.insert(view.sizes.begin(), missing, 1);
  view.strides.insert(view.strides.begin(), missing, 0);
  return view;
}

std::vector<Batch> batches_of(const Sizes& sizes, const Sizes& a, const Sizes& b, const Sizes& out) {
  const Sizes batch(sizes.begin(), sizes.end() - 2);
  std::vector<Batch> found(product(batch));
  for (size_t i = 0; i < found.size(); ++i) {
    int64_t left = static_cast<int64_t>(i);
    for (size_t d = batch.size(); d-- > 0; left /= batch[d]) {
      const int64_t at = left % batch[d];
      found[i].a += at * a[d], found[i].b += at * b[d], found[i].out += at * out[d];
    }
  }
  return found;
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Matmul& by) {
  PlanView one = b.input(by.a), two = b.input(by.b);
  expect_dtype(operation, one, false);
  expect_dtype(operation, two, false);
  expect(operation, std::min(one.rank(), two.rank()) >= 2, "its factors have less than two dimensions");
  const size_t rank = std::max(one.sizes.size(), two.sizes.size());
  one = of_rank(one, rank), two = of_rank(two, rank);
  expect(operation, one.sizes[rank - 1] == two.sizes[rank - 2] && two.sizes[rank - 2] > 0, "its factors have shapes that do not go together");
  Sizes sizes = one.sizes;
  for (size_t d = 0; d + 2 < rank; ++d) {
    expect(operation, one.sizes[d] == two.sizes[d] || one.sizes[d] == 1 || two.sizes[d] == 1,
           "its factors have batches that do not go together");
    if (one.sizes[d] == 1) sizes[d] = two.sizes[d];
  }
  sizes[rank - 1] = two.sizes[rank - 1];
  checked_count(operation, sizes);
  Sizes strides = plain_strides(sizes);
  // The heads of a token side by side, because the next step puts them there.
  if (by.turned && rank == 4)
    strides = {product(sizes) / std::max<int64_t>(sizes[0], 1), sizes[3], sizes[1] * sizes[3], 1};
  const PlanView out = b.fresh(sizes, strides, by.real);
  const Product how{sizes[rank - 2],         sizes[rank - 1],         one.sizes[rank - 1],     one.strides[rank - 2],
                    one.strides[rank - 1],   two.strides[rank - 2],   two.strides[rank - 1],   strides[rank - 2],
                    by.a_zero,               by.b_zero - 128,         by.multiplier,           by.real,
                    by.zero_point,           by.bottom,               by.top};
  if (product(sizes) == 0) return out;
  const std::vector<Batch> batches = batches_of(sizes, repeated(one, sizes), repeated(two, sizes), strides);
  b.hold_table(batches.size(), sizeof(Batch));
  const int64_t products = product(sizes) * std::max<int64_t>(how.k, 1), count = static_cast<int64_t>(batches.size());
  b.emit({&one, &two}, out, [=](const PlanFrame& frame) {
    const int64_t threads = threads_for(products);
    // Fewer matrices than threads: each is packed by every thread that computes some of its rows.
    const int64_t parts = count < threads ? std::min(how.m, (threads + count - 1) / count) : 1, units = count * parts;
    each_thread(std::min(threads, units), [&](int64_t thread) {
      const int64_t used = std::min(threads, units);
      for (int64_t unit = units * thread / used; unit < units * (thread + 1) / used; ++unit) {
        const Batch& at = batches[unit / parts];
        const int64_t part = unit % parts;
        how.run(one.bytes(frame) + at.a, two.bytes(frame) + at.b, how.real ? nullptr : out.bytes_out(frame) + at.out,
                how.real ? out.reals_out(frame) + at.out : nullptr, how.m * part / parts, how.m * (part + 1) / parts);
      }
    });
  });
  return out;
}

}  // namespace octet

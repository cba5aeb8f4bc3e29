// Float steps of a plan: sums, layer norms and attention. kernels/reference_reals.py says what they mean.
#include <algorithm>
#include <cmath>

#include "core/cpu/of_thread.h"
#include "core/gemm/workspace.h"
#include "core/plan/lower.h"
#include "core/rows/reals.h"
#include "core/rows/rows.h"

namespace octet {
namespace {

// A new buffer for reals that lie one after the other.
PlanView plain_reals(PlanBuilder& b, const Sizes& sizes) { return b.fresh(sizes, plain_strides(sizes), true); }

PlanView sum_of(PlanBuilder& b, const Operation& operation, const op::AddReal& add) {
  PlanView left = real_input(b, operation, add.a), right = real_input(b, operation, add.b);
  const Sizes sizes = broadcast(operation, left, right);
  return combined(b, left, right, sizes, real_kernels().add);
}

struct Norm {
  std::shared_ptr<const std::vector<float>> weight, bias;
  float eps;
  int64_t n;
  void row(const float* x, const float* added, float* out) const {
    real_kernels().layer_norm(x, added, n, weight ? weight->data() : nullptr, bias ? bias->data() : nullptr, eps, out);
  }
};

// The kernels have no form for a bias alone: ones in the place of the weight give the same bits.
Norm norm_of(PlanBuilder& b, const Operation& operation, const op::LayerNorm& by, int64_t n) {
  Norm norm{b.reals(operation, by.weight, "weight", n), b.reals(operation, by.bias, "bias", n), by.eps, n};
  if (norm.bias && !norm.weight) norm.weight = std::make_shared<const std::vector<float>>(n, 1.0f);
  return norm;
}

}  // namespace

// A sum that only a layer norm reads is formed there, row by row, and a rounding of the result in the same pass.
PlanView lower(PlanBuilder& b, const Operation& operation, const op::AddReal& add) {
  if (add.norm == kNowhere) return sum_of(b, operation, add);
  const PlanView left = real_input(b, operation, add.a), right = real_input(b, operation, add.b);
  if (left.sizes != right.sizes) return sum_of(b, operation, add);
  b.put_off(operation);
  return left;
}

PlanView lower(PlanBuilder& b, const Operation& operation, const op::LayerNorm& by) {
  const Operation* const sum = b.put_off_sum(by.x);
  const op::AddReal* const terms = sum ? sum->as<op::AddReal>() : nullptr;
  const PlanView x = b.plain(real_input(b, sum ? *sum : operation, terms ? terms->a : by.x));
  const PlanView added = terms ? b.plain(real_input(b, *sum, terms->b)) : x;
  expect(operation, x.rank() >= 1 && x.sizes.back() > 0, "its input has no features");
  const int64_t n = x.sizes.back();
  expect_or(operation, by.size == 0 || by.size == n, [&] { return "its rows have not " + std::to_string(by.size) + " values"; });
  const Norm norm = norm_of(b, operation, by, n);
  const PlanView out = plain_reals(b, x.sizes);
  const bool summed = sum != nullptr;
  const int64_t rows = x.count() / n;
  const Operation* const rounding = by.rounding == kNowhere ? nullptr : &b.operation(by.rounding);
  const Sizes strides = rounding ? rounded_strides(*rounding->as<op::Quantize>(), x.sizes) : Sizes{};
  if (!rounding || strides != plain_strides(x.sizes)) {
    b.emit({&x, &added}, out, [=](const PlanFrame& frame) {
      each_part(rows, rows * n * 8, [&](int64_t first, int64_t count) {
        for (int64_t i = first; i < first + count; ++i)
          norm.row(x.reals(frame) + i * n, summed ? added.reals(frame) + i * n : nullptr, out.reals_out(frame) + i * n);
      });
    });
    return out;
  }
  const PlanView q = b.fresh(x.sizes, strides);
  const RowRange range = rounding->as<op::Quantize>()->range;
  b.emit({&x, &added, &q}, out, [=](const PlanFrame& frame) {
    each_part(rows, rows * n * 8, [&](int64_t first, int64_t count) {
      for (int64_t i = first; i < first + count; ++i) {
        float* const to = out.reals_out(frame) + i * n;
        norm.row(x.reals(frame) + i * n, summed ? added.reals(frame) + i * n : nullptr, to);
        frame.met(row_kernels().quantize(to, nullptr, n, range, 255, q.bytes_out(frame) + i * n, nullptr));
      }
    });
  });
  b.define(*rounding, q);
  return out;
}

namespace {

constexpr int64_t kCachedScores = 1 << 16;

// Where one head's rows begin, in elements.
struct Head {
  int64_t q, k, v, mask, out;
};

struct Room {
  Scratch<float> keys, values, scores;
};

Room& room() {
  thread_local Room* own = nullptr;
  return of_thread(own);
}

struct Attention {
  HeadShape shape;
  int64_t queries, ldq, ldk, ldv, ldout, mask_row, mask_step;
  bool packs_values;
  std::vector<Head> heads;

  void run(const Head& head, const float* q, const float* k, const float* v, const float* mask, float* out) const {
    const HeadMask added{mask ? mask + head.mask : nullptr, mask_row, mask_step};
    const RealKernels& kernels = real_kernels();
    Room& space = room();
    float* const keys = space.keys.get(shape.width * shape.packed_keys);
    kernels.pack_keys(k + head.k, ldk, shape, keys);
    const float* values = v + head.v;
    if (packs_values) {
      float* const packed = space.values.get(shape.keys * shape.packed_values);
      kernels.pack_values(v + head.v, ldv, shape, packed);
      values = packed;
    }
    // So many that their scores stay in a core's cache.
    const int64_t room = kCachedScores / shape.packed_keys / kernels.queries * kernels.queries;
    const int64_t at_once = std::min(queries, std::max(kernels.queries, room));
    float* const scores = space.scores.get(at_once * (shape.packed_keys + shape.packed_values + 1));
    for (int64_t first = 0; first < queries; first += at_once)
      kernels.attend(shape, q + head.q + first * ldq, ldq, first, std::min(at_once, queries - first), keys, values,
                     packs_values ? shape.packed_values : ldv, added, scores, out + head.out + first * ldout, ldout);
  }
};

int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The offsets of every head: all dimensions but the last two, those of size 1 repeated.
std::vector<Head> heads_of(const Sizes& batch, const Sizes& q, const Sizes& k, const Sizes& v, const Sizes& mask,
                           const Sizes& out) {
  std::vector<Head> heads(product(batch));
  for (size_t i = 0; i < heads.size(); ++i) {
    int64_t left = static_cast<int64_t>(i);
    for (size_t d = batch.size(); d-- > 0; left /= batch[d]) {
      const int64_t at = left % batch[d];
      heads[i].q += at * q[d], heads[i].k += at * k[d], heads[i].v += at * v[d];
      heads[i].mask += at * mask[d], heads[i].out += at * out[d];
    }
  }
  return heads;
}

// With the last dimension dense, so that rows can be read as vectors.
PlanView with_rows(PlanBuilder& b, const PlanView& view) {
  return view.rank() < 2 || (view.strides.back() != 1 && view.sizes.back() > 1) ? b.plain(view) : view;
}

// What is added to the scores, with as many dimensions as these.
PlanView mask_of(PlanBuilder& b, const Operation& operation, Value value, const Sizes& scores) {
  PlanView mask = real_input(b, operation, value);
  expect(operation, mask.rank() <= static_cast<int64_t>(scores.size()), "its mask has more dimensions than q");
  const size_t missing = scores.size() - mask.sizes.size();
  mask.sizes.insert(mask.sizes.begin(), missing, 1);
  mask.strides.insert(mask.strides.begin(), missing, 0);
  for (size_t d = 0; d < scores.size(); ++d)
    expect(operation, mask.sizes[d] == scores[d] || mask.sizes[d] == 1, "its mask does not fit the scores");
  return mask;
}

}  // namespace

PlanView lower(PlanBuilder& b, const Operation& operation, const op::Attention& by) {
  const PlanView q = with_rows(b, real_input(b, operation, by.q)), k = with_rows(b, real_input(b, operation, by.k));
  const PlanView v = with_rows(b, real_input(b, operation, by.v));
  const int64_t rank = q.rank();
  expect(operation, rank >= 3 && k.rank() == rank && v.rank() == rank, "q, k and v differ in dimensions, or have less than three");
  Sizes sizes = q.sizes;
  for (int64_t d = 0; d + 2 < rank; ++d) {
    sizes[d] = std::max({q.sizes[d], k.sizes[d], v.sizes[d]});
    for (const PlanView* one : {&q, &k, &v})
      expect(operation, one->sizes[d] == sizes[d] || one->sizes[d] == 1, "q, k and v have batches that do not go together");
  }
  sizes[rank - 1] = v.sizes[rank - 1];
  expect(operation, k.sizes[rank - 1] == q.sizes[rank - 1] && k.sizes[rank - 2] == v.sizes[rank - 2] && k.sizes[rank - 2] > 0,
         "q, k and v have shapes that do not go together");
  // The heads of a token side by side, because the next step puts them there.
  Sizes strides = plain_strides(sizes);
  if (rank >= 4) {
    int64_t step = sizes[rank - 1];
    for (int64_t d = rank - 2; d-- > 1; step *= sizes[d]) strides[d] = step;
    strides[rank - 2] = step, strides[0] = step * sizes[rank - 2];
  }
  const PlanView out = b.fresh(sizes, strides, true);
  const float scale = by.scale ? *by.scale : 1.0f / std::sqrt(static_cast<float>(q.sizes[rank - 1]));
  Attention how{};
  const int64_t columns = real_kernels().columns;
  how.shape = {k.sizes[rank - 2], q.sizes[rank - 1], sizes[rank - 1], scale,
               by.causal, rounded_up(k.sizes[rank - 2], columns), rounded_up(sizes[rank - 1], columns)};
  how.queries = sizes[rank - 2];
  how.ldq = q.strides[rank - 2], how.ldk = k.strides[rank - 2], how.ldv = v.strides[rank - 2], how.ldout = strides[rank - 2];
  // Rows that lie apart, too, where many queries read them.
  how.packs_values = how.shape.packed_values != how.shape.values ||
                     (how.ldv != how.shape.packed_values && how.queries > 2 * real_kernels().queries);
  const Sizes batch(sizes.begin(), sizes.end() - 2);
  Sizes scores = sizes, masked(rank, 0);
  scores.back() = how.shape.keys;
  const bool has_mask = by.mask != kNoValue;
  const PlanView mask = has_mask ? mask_of(b, operation, by.mask, scores) : q;
  if (has_mask) masked = repeated(mask, scores);
  // Of size 1 a dimension has any stride.
  how.mask_row = has_mask && mask.sizes[rank - 2] > 1 ? masked[rank - 2] : 0;
  how.mask_step = has_mask && mask.sizes[rank - 1] > 1 ? masked[rank - 1] : 0;
  how.heads = heads_of(batch, repeated(q, sizes), repeated(k, sizes), repeated(v, sizes), masked, strides);
  b.hold_table(how.heads.size(), sizeof(Head));
  const int64_t products = product(batch) * how.queries * how.shape.keys * (how.shape.width + how.shape.values);
  b.emit({&q, &k, &v, &mask}, out, [=](const PlanFrame& frame) {
    const float* const added = has_mask ? mask.reals(frame) : nullptr;
    const int64_t count = static_cast<int64_t>(how.heads.size());
    const int64_t threads = std::max<int64_t>(1, std::min(threads_for(products * 4), count));
    each_thread(threads, [&](int64_t thread) {
      for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; ++i)
        how.run(how.heads[i], q.reals(frame), k.reals(frame), v.reals(frame), added, out.reals_out(frame));
    });
  });
  return out;
}

}  // namespace octet

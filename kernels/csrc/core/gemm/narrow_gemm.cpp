#include "core/cpu/of_thread.h"
#include "core/gemm/narrow_gemm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/gemm/native_gemm.h"
#include "core/gemm/native_narrow.h"

namespace octet {
namespace {

// Outputs with those that fill the last unit.
int64_t filled(int64_t n) { return (n + kNarrowUnit - 1) / kNarrowUnit * kNarrowUnit; }

// The integer of one weight, as it is stored (kernels/narrow.py).
int stored(const NarrowSource& source, int64_t output, int64_t input) {
  const int bits = source.bits;
  const int64_t whole = source.n / kNarrowUnit * kNarrowUnit, unit_bytes = kNarrowUnit * source.k * bits / 8;
  const int64_t beside = output < whole ? kNarrowUnit : source.n - whole;
  const int i = static_cast<int>(input % kNarrowBlock), j = i % 4;
  const uint8_t* const block = source.bytes + output / kNarrowUnit * unit_bytes + input / kNarrowBlock * bits * beside * 4;
  const auto byte = [&](int vector) { return block[(vector * beside + output % kNarrowUnit) * 4 + j]; };
  if (bits == 4) return byte(i / 8) >> i / 4 % 2 * 4 & 15;
  const int low = byte(i / 16) >> i / 4 % 4 * 2 & 3;
  return bits == 2 ? low : low | (byte(2) >> i / 4 & 1) << 2;
}

// The weight as bytes around 0, for the sums of its rows.
std::vector<int8_t> centred_bytes(const NarrowSource& source) {
  std::vector<int8_t> weight(source.n * source.k);
  for (int64_t j = 0; j < static_cast<int64_t>(weight.size()); ++j)
    weight[j] = static_cast<int8_t>(stored(source, j / source.k, j % source.k) - (1 << (source.bits - 1)));
  return weight;
}

// The last unit, where it is not whole, as if it had 64 outputs.
std::vector<uint8_t> filled_tail(const NarrowSource& source) {
  const int64_t left = source.n % kNarrowUnit, vectors = source.k / kNarrowBlock * source.bits;
  if (left == 0) return {};
  std::vector<uint8_t> tail(vectors * kNarrowUnit * 4);
  const uint8_t* const from = source.bytes + (source.n - left) * source.k * source.bits / 8;
  for (int64_t v = 0; v < vectors; ++v) std::memcpy(tail.data() + v * kNarrowUnit * 4, from + v * left * 4, left * 4);
  return tail;
}

// NaN for infinity too, which no scale is.
float real_of_half(uint16_t half) {
  if ((half & 0x7c00) == 0x7c00) return NAN;
  float real;
  const uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
  std::memcpy(&real, &bits, sizeof real);
  return (half & 0x8000 ? -real : real) * 0x1p112f;
}

// Kernels take a half's bits apart as those of a finite number without a sign, and a zero point as a byte.
void check(float scale, float zero_point, int bits, int64_t output, int64_t group) {
  const auto refuse = [&](const char* name, float value, const std::string& expected) {
    throw std::invalid_argument(std::string(name) + " of output " + std::to_string(output) + ", group " + std::to_string(group) +
                                " is " + std::to_string(value) + ", expected " + expected);
  };
  if (std::signbit(scale) || !std::isfinite(scale)) refuse("scale", scale, "a finite number that is not negative");
  const float top = static_cast<float>((1 << bits) - 1);
  if (!(zero_point >= 0.0f && zero_point <= top && zero_point == std::floor(zero_point)))
    refuse("zero point", zero_point, "a whole number from 0 to " + std::to_string((1 << bits) - 1));
}

struct Room {
  Scratch<int8_t> rows;
  Scratch<int32_t> sums, starts, zeros;
};

// Activations of a call less 128, and the sums of their groups.
NarrowRows prepared(const uint8_t* x, int64_t ldx, int64_t m, int64_t k, int64_t group, int bits, const int32_t* zero_points) {
  thread_local Room* own = nullptr;
  auto& [rows, sums, starts, zeros] = of_thread(own);
  const int64_t groups = k / group;
  // Neighbouring rows in other sets of the L1 cache, which a power of two would not give.
  const int64_t ld = (k + 63) / 64 * 64 + 64;
  int8_t* const centred = rows.get((m + 15) / 16 * 16 * ld);
  int32_t* const of_groups = sums.get(m * groups);
  int32_t* const less = zeros.get(m);
  for (int64_t i = 0; i < m; ++i) {
    native_narrow().prepare(x + i * ldx, k, group, centred + i * ld, of_groups + i * groups);
    less[i] = zero_points ? zero_points[i] - 128 : 0;
  }
  int32_t* const begin = zero_points ? starts.get(m * groups) : nullptr;
  if (begin)
    for (int64_t i = 0; i < m * groups; ++i) begin[i] = -(of_groups[i] * (1 << (bits - 1)));
  return {centred, ld, m, of_groups, begin, less};
}

// The units of a thread, and the output that begins them.
int64_t first_unit(int64_t n, int64_t thread, int64_t threads) {
  return (n + kNarrowUnit - 1) / kNarrowUnit * thread / threads;
}

// Whether this CPU multiplies bytes in tiles, as much faster than vectors as it takes to unpack a weight for them; their groups are
// units (native_gemm.h).
bool has_tiles() { return native_gemm().takes_whole != nullptr; }

class NarrowSums final : public PackedGemm {
 public:
  explicit NarrowSums(const NarrowSource& source)
      : PackedGemm(centred_bytes(source).data(), source.n, source.k),
        tail_(filled_tail(source)),
        weight_{source.bytes, tail_.data(), tail_sums_, source.n, source.k, source.bits, source.k, nullptr, false, nullptr, nullptr} {
    const int64_t left = n() % kNarrowPanel;
    std::copy_n(row_sums() + n() - left, left, tail_sums_);
  }

  void run(const uint8_t* x, int64_t ldx, int64_t m, int32_t* acc, int64_t ldacc, int thread, int threads) const override {
    run_share(x, ldx, m, acc, ldacc, thread, threads, false);
  }
  void run_backwards(const uint8_t* x, int64_t ldx, int64_t m, int32_t* acc, int64_t ldacc, int thread,
                     int threads) const override {
    run_share(x, ldx, m, acc, ldacc, thread, threads, true);
  }
  int64_t first_output(int thread, int threads) const override {
    return std::min(n(), first_unit(n(), thread, threads) * kNarrowUnit);
  }
  bool takes_whole(int64_t rows) const override { return has_tiles() && native_gemm().takes_whole(rows, n(), k()); }
  std::string route() const override { return native_narrow().route; }

 private:
  void run_share(const uint8_t* x, int64_t ldx, int64_t m, int32_t* acc, int64_t ldacc, int thread, int threads,
                 bool backwards) const {
    if (takes_whole(m))
      return run_tiles(x, ldx, m, acc, ldacc, first_unit(n(), thread, threads), first_unit(n(), thread + 1, threads));
    native_narrow().run(weight_, prepared(x, ldx, m, k(), k(), weight_.bits, nullptr), {acc, row_sums(), nullptr, ldacc},
                        first_unit(n(), thread, threads), first_unit(n(), thread + 1, threads), backwards);
  }

  // By the kernel of bytes, each unit unpacked once for all rows.
  void run_tiles(const uint8_t* x, int64_t ldx, int64_t m, int32_t* acc, int64_t ldacc, int64_t first, int64_t last) const {
    thread_local Scratch<int8_t>* own = nullptr;
    const NativeGemm& gemm = native_gemm();
    const int64_t most = gemm.packed_bytes(kNarrowUnit, k()) + kSlack;
    int8_t* const unpacked = of_thread(own).get(most);
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t begin = unit * kNarrowUnit, count = std::min(kNarrowUnit, n() - begin), panels = (count + 15) / 16;
      native_narrow().unpack(weight_, unit, unpacked);
      // Depth that fills the last tile.
      std::fill(unpacked + panels * kNarrowPanel * k(), unpacked + most, 0);
      gemm.run(x, ldx, m, unpacked, count, k(), acc + begin, ldacc, 0, 1, false);
    }
  }

  int64_t packed_bytes() const override { return static_cast<int64_t>(tail_.size()); }

  std::vector<uint8_t> tail_;
  int32_t tail_sums_[kNarrowPanel] = {};
  NarrowWeight weight_;
};

class NarrowGroups final : public GroupedGemm {
 public:
  explicit NarrowGroups(const NarrowSource& source)
      : GroupedGemm(centred_bytes(source).data(), source.n, source.k), tail_(filled_tail(source)) {
    const int64_t groups = source.groups, group = k() / groups, places = filled(n()) * groups;
    (source.half_scales ? halves_.resize(places) : floats_.resize(places));
    if (source.zero_points) zero_points_.resize(places);
    row_reals_.resize(filled(n()));
    for (int64_t output = 0; output < n(); ++output)
      for (int64_t g = 0; g < groups; ++g)
        take(source, output, g, (output / kNarrowUnit * groups + g) * kNarrowUnit + output % kNarrowUnit);
    const void* const scales = source.half_scales ? static_cast<const void*>(halves_.data()) : floats_.data();
    weight_ = {source.bytes, tail_.data(), nullptr, n(),
               k(),          source.bits,  group,   scales,
               source.half_scales, source.zero_points ? zero_points_.data() : nullptr, row_reals_.data()};
  }

  void run_reals(const uint8_t* x, int64_t ldx, int64_t m, const int32_t* zero_points, float* y, int64_t ldy, int thread,
                 int threads, bool backwards) const override {
    native_narrow().run(weight_, prepared(x, ldx, m, k(), weight_.group, weight_.bits, zero_points), {nullptr, nullptr, y, ldy},
                        first_unit(n(), thread, threads), first_unit(n(), thread + 1, threads), backwards);
  }
  void run(const uint8_t*, int64_t, int64_t, int32_t*, int64_t, int, int) const override {
    throw std::logic_error("a weight with scales by group has reals, not sums");
  }
  int64_t first_output(int thread, int threads) const override {
    return std::min(n(), first_unit(n(), thread, threads) * kNarrowUnit);
  }
  bool takes_whole(int64_t rows) const override {
    return native_narrow().takes_whole && native_narrow().takes_whole(weight_, rows);
  }
  std::string route() const override { return native_narrow().route; }

 private:
  // One scale, to its place among those of the panel, and its part of the row's reals.
  void take(const NarrowSource& source, int64_t output, int64_t g, int64_t place) {
    const int64_t group = k() / source.groups, index = (output * source.groups + g) * (source.zero_points ? 2 : 1);
    float scale, real_zero_point = static_cast<float>(1 << (source.bits - 1));
    if (source.half_scales) {
      const auto* const halves = static_cast<const uint16_t*>(source.scales) + index;
      halves_[place] = halves[0];
      scale = real_of_half(halves[0]);
      if (source.zero_points) real_zero_point = real_of_half(halves[1]);
    } else {
      const auto* const floats = static_cast<const float*>(source.scales) + index;
      floats_[place] = scale = floats[0];
      if (source.zero_points) real_zero_point = floats[1];
    }
    check(scale, real_zero_point, source.bits, output, g);
    const int zero_point = static_cast<int>(real_zero_point);
    if (source.zero_points) zero_points_[place] = static_cast<uint8_t>(zero_point);
    int32_t sum = 0;
    for (int64_t i = 0; i < group; ++i) sum += stored(source, output, g * group + i) - zero_point;
    row_reals_[output] = row_reals_[output] + static_cast<float>(sum) * scale;
  }

  int64_t packed_bytes() const override {
    return static_cast<int64_t>(tail_.size() + zero_points_.size() + halves_.size() * sizeof(uint16_t) +
                                (floats_.size() + row_reals_.size()) * sizeof(float));
  }

  std::vector<uint8_t> tail_, zero_points_;
  std::vector<uint16_t> halves_;
  std::vector<float> floats_, row_reals_;
  NarrowWeight weight_{};
};

}  // namespace

std::unique_ptr<PackedGemm> pack_narrow(const NarrowSource& source) {
  if (source.groups) return std::make_unique<NarrowGroups>(source);
  return std::make_unique<NarrowSums>(source);
}

}  // namespace octet

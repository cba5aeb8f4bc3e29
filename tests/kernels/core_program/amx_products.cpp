// The products of AMX (core/gemm/tile_amx.h) over emulated tiles, beside plain loops. Activations end where a page ends and the
// next may not be read. `amx_products` prints how many cases were exact; `amx_products FAULT` makes one that the CPU refuses.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/gemm/tile_amx.h"
#include "core/gemm/vectors_plain.h"

using namespace octet;
using Gemm = amx::Gemm<EmulatedTiles, Plain>;

namespace {

// Bytes that end before a page that may not be read.
class Guarded {
 public:
  explicit Guarded(int64_t bytes) : page_(sysconf(_SC_PAGESIZE)), whole_((bytes + page_ - 1) / page_ * page_ + page_) {
    memory_ = static_cast<uint8_t*>(mmap(nullptr, whole_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(memory_ + whole_ - page_, page_, PROT_NONE);
    data = memory_ + whole_ - page_ - bytes;
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(memory_, whole_); }
  uint8_t* data;

 private:
  int64_t page_, whole_;
  uint8_t* memory_;
};

struct Case {
  int64_t m, k, n;
  bool extreme, backwards;
};

bool exact(const Case& c, std::mt19937& bits) {
  // Products to bytes and reals may read no byte more than K of a multiple of 4.
  const int64_t ldx = (c.k + 3) / 4 * 4, groups = (c.n + 63) / 64;
  const Guarded x((c.m - 1) * ldx + ldx);
  for (int64_t i = 0; i < c.m * ldx; ++i) x.data[i] = static_cast<uint8_t>(c.extreme ? 255 : bits());
  std::vector<int8_t> weight(c.n * c.k), packed(Gemm::packed_bytes(c.n, c.k));
  for (int8_t& w : weight) w = static_cast<int8_t>(c.extreme ? (bits() % 2 ? 127 : -128) : bits());
  Gemm::pack(weight.data(), c.n, c.k, packed.data());

  std::vector<int32_t> offset(c.n + 64);
  std::vector<float> multiplier(c.n + 64);
  for (int64_t j = 0; j < c.n; ++j) offset[j] = static_cast<int32_t>(bits() % 9999), multiplier[j] = 1e-6f * (bits() % 5000);
  const Requantize by{offset.data(), multiplier.data(), 7, 5, 250, true};

  const int64_t ld = c.n + 3;
  std::vector<int32_t> sums(c.m * ld, -1);
  std::vector<uint8_t> q(c.m * ld, 1);
  std::vector<float> reals(c.m * ld, -1.0f);
  // As two threads share the groups.
  for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, groups / 2}, {groups / 2, groups}}) {
    Gemm::run(x.data, ldx, c.m, packed.data(), c.n, c.k, sums.data(), ld, first, last, c.backwards);
    Gemm::run_u8(x.data, ldx, c.m, packed.data(), c.n, c.k, by, q.data(), ld, first, last);
    Gemm::run_f32(x.data, ldx, c.m, packed.data(), c.n, c.k, by, reals.data(), ld, first, last);
  }
  for (int64_t i = 0; i < c.m; ++i) {
    for (int64_t j = 0; j < c.n; ++j) {
      int32_t sum = 0;
      for (int64_t d = 0; d < c.k; ++d) sum += x.data[i * ldx + d] * weight[j * c.k + d];
      const float real = static_cast<float>(sum + offset[j]) * multiplier[j];
      const float byte = std::clamp(std::nearbyint(real) + 7.0f, 5.0f, 250.0f);
      if (sums[i * ld + j] != sum || reals[i * ld + j] != real || q[i * ld + j] != static_cast<uint8_t>(byte)) return false;
    }
    // Behind a row's last output nothing is written.
    for (int64_t j = c.n; j < ld; ++j)
      if (sums[i * ld + j] != -1 || reals[i * ld + j] != -1.0f || q[i * ld + j] != 1) return false;
  }
  return true;
}

int compare() {
  std::mt19937 bits(1);
  int tiled = 0;
  for (int i = 0; i < 400; ++i) {
    static constexpr int64_t kDepths[] = {60, 63, 64, 65, 68, 127, 128, 129, 132, 192, 196, 255, 256, 260, 516, 960};
    const int64_t k = i % 2 ? kDepths[bits() % std::size(kDepths)] : 1 + bits() % 300;
    const Case c{1 + static_cast<int64_t>(bits() % 70), k, 1 + static_cast<int64_t>(bits() % 200), i % 5 == 0, i % 3 == 0};
    tiled += amx::pays(c.m, c.k);
    if (!exact(c, bits)) return std::printf("wrong: %ld rows of %ld to %ld\n", c.m, c.k, c.n), 1;
  }
  std::printf("400 exact, %d of them in tiles\n", tiled);
  return 0;
}

// What the CPU refuses, by name.
void fault(const std::string& name) {
  alignas(64) uint8_t memory[1024] = {};
  if (name == "unconfigured") return EmulatedTiles::load<4>(memory, 64);
  if (name == "too large") return amx::configure<EmulatedTiles>(17, 64);
  amx::configure<EmulatedTiles>(16, 32);
  if (name == "released") return EmulatedTiles::release(), EmulatedTiles::zero<0>();
  if (name == "depth") return EmulatedTiles::dot<0, 1, 6>();
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return compare();
  fault(arguments[1]);
  return 0;
}

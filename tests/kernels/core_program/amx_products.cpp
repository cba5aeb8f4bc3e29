// The products of AMX (core/gemm/tile_amx.h) over emulated tiles, beside plain loops: of matrices, and of images as they lie.
// Activations end where a page ends and the next may not be read. `amx_products` prints how many cases were exact; `amx_products FAULT`
// makes one that the CPU refuses.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/gemm/tile_amx.h"
#include "core/gemm/tile_pieces.h"
#if defined(__AVX512VNNI__)
#include "core/gemm/policy_avx512vnni.h"
#else
#include "core/gemm/vectors_plain.h"
#endif

using namespace octet;

namespace {

// With the flags of AVX-512, the vectors beside the CPU's own tiles: what requantises, and takes few rows.
#if defined(__AVX512VNNI__)
using Vectors = Avx512Vnni;
#else
using Vectors = Plain;
#endif
constexpr NativeGemm kVectorGemm = tile::table_with_pieces<Vectors>("vectors");
using Gemm = amx::Gemm<EmulatedTiles, Vectors, kVectorGemm>;

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

// Equation 7, and its settings.
struct Bytes {
  std::vector<int32_t> offset;
  std::vector<float> multiplier;
  Requantize by;
  Bytes(int64_t n, std::mt19937& bits) : offset(n + 64), multiplier(n + 64) {
    for (int64_t j = 0; j < n; ++j) offset[j] = static_cast<int32_t>(bits() % 9999), multiplier[j] = 1e-6f * (bits() % 5000);
    by = {offset.data(), multiplier.data(), 7, 5, 250, true};
  }
  float real(int32_t sum, int64_t j) const { return static_cast<float>(sum + offset[j]) * multiplier[j]; }
  uint8_t byte(int32_t sum, int64_t j) const {
    return static_cast<uint8_t>(std::clamp(std::nearbyint(real(sum, j)) + 7.0f, 5.0f, 250.0f));
  }
};

// A residual of either side: the bytes of a layer and of the other, added.
struct Sum {
  Residual residual{{11, 250, 0.75f, 0.5f, 3, 9, 240}, nullptr, true};
  uint8_t byte(uint8_t own, uint8_t other) const {
    const AddSettings& s = residual.by;
    const uint8_t a = residual.first ? own : other, b = residual.first ? other : own;
    const float sum = static_cast<float>(a - s.a_zero) * s.a_multiplier + static_cast<float>(b - s.b_zero) * s.b_multiplier;
    return static_cast<uint8_t>(std::clamp(std::nearbyint(sum) + 3.0f, 9.0f, 240.0f));
  }
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

  const Bytes bytes(c.n, bits);
  const int64_t ld = c.n + 3;
  std::vector<int32_t> sums(c.m * ld, -1);
  std::vector<uint8_t> q(c.m * ld, 1);
  std::vector<float> reals(c.m * ld, -1.0f);
  // The other side lies where the outputs go.
  std::vector<uint8_t> added(c.m * ld, 1);
  for (int64_t i = 0; i < c.m; ++i)
    for (int64_t j = 0; j < c.n; ++j) added[i * ld + j] = static_cast<uint8_t>(i * 31 + j * 7);
  Sum sum_by;
  sum_by.residual.other = added.data(), sum_by.residual.first = c.k % 2;
  Requantize adding = bytes.by;
  adding.residual = &sum_by.residual;
  // As two threads share the groups.
  for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, groups / 2}, {groups / 2, groups}}) {
    Gemm::run(x.data, ldx, c.m, packed.data(), c.n, c.k, sums.data(), ld, first, last, c.backwards);
    Gemm::run_u8(x.data, ldx, c.m, packed.data(), c.n, c.k, bytes.by, q.data(), ld, first, last);
    Gemm::run_f32(x.data, ldx, c.m, packed.data(), c.n, c.k, bytes.by, reals.data(), ld, first, last);
    Gemm::run_u8(x.data, ldx, c.m, packed.data(), c.n, c.k, adding, added.data(), ld, first, last);
  }
  for (int64_t i = 0; i < c.m; ++i) {
    for (int64_t j = 0; j < c.n; ++j) {
      int32_t sum = 0;
      for (int64_t d = 0; d < c.k; ++d) sum += x.data[i * ldx + d] * weight[j * c.k + d];
      if (sums[i * ld + j] != sum || reals[i * ld + j] != bytes.real(sum, j) || q[i * ld + j] != bytes.byte(sum, j)) return false;
      if (added[i * ld + j] != sum_by.byte(bytes.byte(sum, j), static_cast<uint8_t>(i * 31 + j * 7))) return false;
    }
    // Behind a row's last output nothing is written.
    for (int64_t j = c.n; j < ld; ++j)
      if (sums[i * ld + j] != -1 || reals[i * ld + j] != -1.0f || q[i * ld + j] != 1 || added[i * ld + j] != 1) return false;
  }
  return true;
}

// A convolution of an image without padding.
struct Image {
  int64_t height, width, channels, kernel, stride, outputs;
  int64_t piece() const { return kernel * channels; }
  int64_t filled() const { return (piece() + 3) / 4 * 4; }
  int64_t out(int64_t size) const { return (size - kernel) / stride + 1; }
  int64_t k() const { return kernel * filled(); }
};

bool exact(const Image& c, const ImageRows& shape, std::mt19937& bits) {
  const int64_t line = c.width * c.channels, rows = c.out(c.height) * c.out(c.width), groups = (c.outputs + 63) / 64;
  // The last piece may be read to the end of its step.
  const Guarded x(c.height * line + c.filled() - c.piece());
  for (int64_t i = 0; i < c.height * line + c.filled() - c.piece(); ++i) x.data[i] = static_cast<uint8_t>(bits());
  std::vector<int8_t> weight(c.outputs * c.k(), 0), packed(Gemm::packed_bytes(c.outputs, c.k()));
  for (int64_t row = 0; row < c.outputs * c.kernel; ++row)
    for (int64_t i = 0; i < c.piece(); ++i) weight[row * c.filled() + i] = static_cast<int8_t>(bits());
  Gemm::pack(weight.data(), c.outputs, c.k(), packed.data());
  const Bytes bytes(c.outputs, bits);
  const int64_t ld = c.outputs + 3;
  std::vector<uint8_t> q(rows * ld, 1), by_vectors(rows * ld, 1), added(rows * ld, 1);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < c.outputs; ++j) added[i * ld + j] = static_cast<uint8_t>(i * 31 + j * 7);
  Sum sum_by;
  sum_by.residual.other = added.data(), sum_by.residual.first = false;
  Requantize adding = bytes.by;
  adding.residual = &sum_by.residual;
  ImageRows image = shape;
  image.first = x.data;
  Gemm::run_image_u8(image, packed.data(), c.outputs, bytes.by, q.data(), ld, 0, groups / 2);
  Gemm::run_image_u8(image, packed.data(), c.outputs, bytes.by, q.data(), ld, groups / 2, groups);
  Gemm::run_image_u8(image, packed.data(), c.outputs, adding, added.data(), ld, 0, groups);
  std::vector<const uint8_t*> begins;
  for (int64_t i = 0; i < rows; ++i)
    begins.push_back(x.data + i / image.width * image.line + i % image.width * image.pixel);
  Gemm::run_pieces_u8(begins.data(), image.pieces, rows, packed.data(), c.outputs, bytes.by, by_vectors.data(), ld);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < c.outputs; ++j) {
      int32_t sum = 0;
      for (int64_t h = 0; h < c.kernel; ++h)
        for (int64_t d = 0; d < c.piece(); ++d)
          sum += begins[i][h * line + d] * weight[j * c.k() + h * c.filled() + d];
      if (q[i * ld + j] != bytes.byte(sum, j) || by_vectors[i * ld + j] != bytes.byte(sum, j)) return false;
      if (added[i * ld + j] != sum_by.byte(bytes.byte(sum, j), static_cast<uint8_t>(i * 31 + j * 7))) return false;
    }
    for (int64_t j = c.outputs; j < ld; ++j)
      if (q[i * ld + j] != 1 || added[i * ld + j] != 1) return false;
  }
  return true;
}

int compare_images() {
  std::mt19937 bits(2);
  int across = 0, within = 0;
  while (across + within < 200) {
    static constexpr int64_t kChannels[] = {3, 8, 16, 24, 48, 64, 96, 128};
    const int64_t kernel = 1 + bits() % 4, stride = 1 + bits() % 2;
    const Image c{kernel + static_cast<int64_t>(bits() % 20), kernel + static_cast<int64_t>(bits() % 40), kChannels[bits() % 8], kernel,
                  stride, 1 + static_cast<int64_t>(bits() % 150)};
    std::vector<int64_t> starts;
    for (int64_t h = 0; h < kernel; ++h) starts.push_back(h * c.width * c.channels);
    const ImageRows rows{nullptr, c.out(c.height), stride * c.width * c.channels, c.out(c.width), stride * c.channels,
                         {starts.data(), kernel, c.piece()}};
    if (!amx::Depth::filling(c.piece()).steps) continue;
    if (!exact(c, rows, bits))
      return std::printf("wrong: %ld x %ld, %ld channels, kernel %ld, stride %ld\n", c.height, c.width, c.channels, kernel, stride), 1;
    ++(amx::ImageTiles(rows).across ? across : within);
  }
  std::printf("%d images exact across lines, %d within\n", across, within);
  return 0;
}

int compare() {
  std::mt19937 bits(1);
  int tiled = 0;
  for (int i = 0; i < 400; ++i) {
    static constexpr int64_t kDepths[] = {60, 63, 64, 65, 68, 127, 128, 129, 132, 192, 196, 255, 256, 260, 516, 960};
    const int64_t k = i % 2 ? kDepths[bits() % std::size(kDepths)] : 1 + bits() % 300;
    const Case c{1 + static_cast<int64_t>(bits() % 70), k, 1 + static_cast<int64_t>(bits() % 200), i % 5 == 0, i % 3 == 0};
    tiled += amx::pays(c.m, c.k, c.n);
    if (!exact(c, bits)) return std::printf("wrong: %ld rows of %ld to %ld\n", c.m, c.k, c.n), 1;
  }
  std::printf("400 exact, %d of them in tiles\n", tiled);
  return compare_images();
}

// What the CPU refuses, by name.
void fault(const std::string& name) {
  alignas(64) uint8_t memory[1024] = {};
  if (name == "unconfigured") return EmulatedTiles::load<4>(memory, 64);
  if (name == "too large") return configure<EmulatedTiles>(17, 64);
  configure<EmulatedTiles>(16, 32);
  if (name == "released") return EmulatedTiles::release(), EmulatedTiles::zero<0>();
  if (name == "depth") return EmulatedTiles::dot<0, 1, 6>();
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return compare();
  fault(arguments[1]);
  return 0;
}

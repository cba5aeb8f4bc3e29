// 3 x 3 convolutions of stride 1 with a quarter of the multiplications, exactly: Winograd's F(4 x 4, 3 x 3) (Lavin and
// Gray 2015, arXiv 1509.09308, section 4.3) in integers. kernels/README.md, equation 10, derives the matrices and says why
// arithmetic modulo 2**32 is enough. Written once over vectors of the instruction set.
//
// An `Arch` says: Gemm (an Arch of tile.h whose dot multiplies pairs of int16; its bytes are those of the pairs) and kBytes
// (of a vector).
#pragma once

#include <vector>

#include "core/conv/native_winograd.h"
#include "core/gemm/tile.h"

namespace octet::winograd {

constexpr int kIn = 6, kOut = 4, kPositions = kIn * kIn, kPixels = kOut * kOut;

template <class A>
struct Vectors {
  typedef uint8_t Bytes __attribute__((vector_size(A::kBytes / 2)));
  typedef uint16_t Words __attribute__((vector_size(A::kBytes)));
  typedef uint32_t Ints __attribute__((vector_size(A::kBytes)));
  typedef int32_t Signed __attribute__((vector_size(A::kBytes)));
  static constexpr int64_t kWords = A::kBytes / 2, kInts = A::kBytes / 4;
};

// Rows of a position's matrix begin in another set of the L1 cache than those of the next position.
inline int64_t spread(int64_t bytes) { return (bytes + 63) / 64 * 64 + 64; }

// The weights' side of equation 10, whose rows are whole numbers.
constexpr int kWeightSide[kIn][3] = {{6, 0, 0}, {1, 1, 1}, {1, -1, 1}, {1, 2, 4}, {1, -2, 4}, {0, 0, 6}};

// The inputs' side, along one axis.
template <class V>
inline void input_side(const V (&d)[kIn], V (&v)[kIn]) {
  const V a = d[4] - (d[2] << 2), b = d[3] - (d[1] << 2);
  const V c = d[4] - d[2], e = (d[3] - d[1]) << 1;
  v[0] = ((d[0] - d[2]) << 2) + c;
  v[1] = a + b;
  v[2] = a - b;
  v[3] = c + e;
  v[4] = c - e;
  v[5] = d[5] - d[3] - (e << 1);
}

// The outputs' side, along one axis: kDivisor[i] = 3 << kShift[i] times the sums.
constexpr int kShift[kOut] = {3, 2, 1, 1};
constexpr uint32_t kInverseOf9 = 954437177;  // 9 * kInverseOf9 = 2**33 + 1
static_assert(9 * kInverseOf9 == 1);

template <class V>
inline void output_side(const V (&m)[kIn], V (&y)[kOut]) {
  const V a = m[1] + m[2], b = m[1] - m[2], c = m[3] + m[4], d = m[3] - m[4];
  y[0] = m[0] - (a << 2) + c;
  y[1] = d - (b << 1);
  y[2] = c - a;
  y[3] = (d << 1) - b + m[5];
}

template <class A>
int64_t packed_bytes(int64_t outputs, int64_t channels) {
  return kPositions * tile::packed_bytes<typename A::Gemm>(outputs, 2 * channels);
}

// weight (outputs, channels, 3, 3). By group of outputs, then position.
template <class A>
void pack(const int8_t* weight, int64_t outputs, int64_t channels, int8_t* packed) {
  using Gemm = typename A::Gemm;
  std::vector<int16_t> rows(tile::kGroup<Gemm> * channels);
  for (int64_t n0 = 0; n0 < outputs; n0 += tile::kGroup<Gemm>) {
    const int64_t n = std::min(tile::kGroup<Gemm>, outputs - n0);
    for (int position = 0; position < kPositions; ++position) {
      const int(&down)[3] = kWeightSide[position / kIn], (&across)[3] = kWeightSide[position % kIn];
      for (int64_t i = 0; i < n * channels; ++i) {
        int sum = 0;
        for (int tap = 0; tap < 9; ++tap)
          sum += down[tap / 3] * across[tap % 3] * weight[(n0 * channels + i) * 9 + tap];
        rows[i] = static_cast<int16_t>(sum);
      }
      tile::pack<Gemm>(reinterpret_cast<const int8_t*>(rows.data()), n, 2 * channels, packed);
      packed += tile::packed_bytes<Gemm>(n, 2 * channels);
    }
  }
}

// One tile to a row of each position's matrix.
template <class A>
void transform_input(const uint8_t* const* pixels, int64_t channels, uint16_t* v, int64_t stride) {
  using Words = typename Vectors<A>::Words;
  using Bytes = typename Vectors<A>::Bytes;
  for (int64_t c = 0; c < channels; c += Vectors<A>::kWords) {
    Words half[kIn][kIn];
    for (int w = 0; w < kIn; ++w) {
      Words d[kIn], column[kIn];
      for (int h = 0; h < kIn; ++h) {
        Bytes bytes;
        std::memcpy(&bytes, pixels[h * kIn + w] + c, sizeof bytes);
        d[h] = __builtin_convertvector(bytes, Words);
      }
      input_side(d, column);
      for (int h = 0; h < kIn; ++h) half[h][w] = column[h];
    }
    for (int h = 0; h < kIn; ++h) {
      Words row[kIn];
      input_side(half[h], row);
      for (int w = 0; w < kIn; ++w) std::memcpy(v + (h * kIn + w) * stride + c, &row[w], sizeof row[w]);
    }
  }
}

// The products of one tile, `row` outputs, to its sums (kPixels, row).
template <class A>
void transform_output(const int32_t* products, int64_t stride, int64_t row, int32_t* sums) {
  using Ints = typename Vectors<A>::Ints;
  using Signed = typename Vectors<A>::Signed;
  for (int64_t c = 0; c < row; c += Vectors<A>::kInts) {
    Ints half[kOut][kIn];
    for (int w = 0; w < kIn; ++w) {
      Ints m[kIn], column[kOut];
      for (int h = 0; h < kIn; ++h) std::memcpy(&m[h], products + (h * kIn + w) * stride + c, sizeof m[h]);
      output_side(m, column);
      for (int h = 0; h < kOut; ++h) half[h][w] = column[h];
    }
    for (int h = 0; h < kOut; ++h) {
      Ints y[kOut];
      output_side(half[h], y);
      for (int w = 0; w < kOut; ++w) {
        const Signed sum = reinterpret_cast<Signed>(y[w] * kInverseOf9) >> (kShift[h] + kShift[w]);
        std::memcpy(sums + (h * kOut + w) * row + c, &sum, sizeof sum);
      }
    }
  }
}

template <class A>
int64_t scratch_bytes(int64_t tiles, int64_t channels) {
  return kPositions * (spread(tiles * channels * 2) + spread(tiles * tile::kGroup<typename A::Gemm> * 4));
}

// What `to` makes of the sums of one tile; to.out is its first pixel.
template <class Gemm, int B = Gemm::kBlocks>
void put_tile(int blocks, const WinogradTile& tile, tile::Bytes<Gemm> to, const int32_t* sums, int64_t columns) {
  if (blocks < B) {
    if constexpr (B > 1) put_tile<Gemm, B - 1>(blocks, tile, to, sums, columns);
    return;
  }
  constexpr int64_t kRow = B * Gemm::kLanes;
  for (int h = 0; h < tile.height; ++h, sums += kOut * kRow) {
    to.out = tile.out[h] + to.channel;
    if (tile.width == kOut) {
      to.template put<kOut, B>(sums, columns);
      continue;
    }
    for (int w = 0; w < tile.width; ++w, to.out += to.ld) to.template put<1, B>(sums + w * kRow, columns);
  }
}

template <class A>
void run(const WinogradTile* tiles, int64_t count, int64_t channels, const int8_t* packed, int64_t outputs,
         const Requantize& by, void* scratch) {
  using Gemm = typename A::Gemm;
  constexpr int64_t kGroup = tile::kGroup<Gemm>;
  const int64_t v_bytes = spread(count * channels * 2), m_bytes = spread(count * kGroup * 4);
  uint8_t* const v = static_cast<uint8_t*>(scratch);
  int32_t* const m = reinterpret_cast<int32_t*>(v + kPositions * v_bytes);
  for (int64_t t = 0; t < count; ++t)
    transform_input<A>(tiles[t].in, channels, reinterpret_cast<uint16_t*>(v) + t * channels, v_bytes / 2);
  const int64_t steps = tile::ceil_div(2 * channels, Gemm::kStep);
  const typename Gemm::Rounding rounding(by);
  for (int64_t n0 = 0; n0 < outputs; n0 += kGroup) {
    const int blocks = tile::blocks_of<Gemm>(outputs, n0);
    const int64_t row = blocks * Gemm::kLanes;
    for (int position = 0; position < kPositions; ++position, packed += row * steps * Gemm::kStep)
      tile::group<Gemm>(blocks, v + position * v_bytes, 2 * channels, count, packed, steps,
                        tile::Sums<Gemm>{m + position * m_bytes / 4, row}, row);
    for (int64_t t = 0; t < count; ++t) {
      alignas(64) int32_t sums[kPixels * kGroup];
      transform_output<A>(m + t * row, m_bytes / 4, row, sums);
      put_tile<Gemm>(blocks, tiles[t], {&by, &rounding, nullptr, outputs, n0}, sums, std::min(row, outputs - n0));
    }
  }
}

template <class A>
constexpr NativeWinograd table() {
  return {Vectors<A>::kWords, &packed_bytes<A>, &pack<A>, &scratch_bytes<A>, &run<A>};
}

}  // namespace octet::winograd

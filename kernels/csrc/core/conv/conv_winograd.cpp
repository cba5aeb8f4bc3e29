// 3 x 3 convolutions by Winograd's algorithm (kernels/README.md, equation 10): which layers, and what each tile reads.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/conv/conv.h"
#include "core/conv/conv_workspace.h"
#include "core/conv/native_winograd.h"
#include "core/cpu/memory.h"
#include "core/gemm/workspace.h"

namespace octet {
namespace {

// Sums are known modulo 2**32 after a multiplication by up to 2**6 * 9, so they are exact below 2**25.
constexpr int64_t kMostSum = (1 << 25) - 1;

// Tiles whose matrices are multiplied at once: enough that reading the weights hides behind the products, few enough for
// the L2 cache. A layer with fewer does not gain: ResNet's 256 channels at 14 x 14 are 16 tiles, a third of them outside.
constexpr int64_t kTiles = 24, kMostTiles = 28;
// Weights take eight times their size, 36 int16 for 9 int8: 512 channels to 512 would be 19 MB, of a layer that may be one
// of many.
constexpr int64_t kMostBytes = 8 << 20;
// Below this many outputs the transforms cost what the products save.
constexpr int64_t kLeastOutputs = 32;

int64_t tiles_along(int64_t size) { return (size + 3) / 4; }

int64_t tiles_of(const ConvShape& shape) {
  return shape.batch * shape.out[0] * tiles_along(shape.out[1]) * tiles_along(shape.out[2]);
}

// `border` is a pixel of zero points.
WinogradTile tile_at(const ConvShape& shape, int64_t index, const uint8_t* q_x, const uint8_t* border, uint8_t* out) {
  const int64_t across = tiles_along(shape.out[2]), down = tiles_along(shape.out[1]);
  const int64_t w = index % across * 4, h = index / across % down * 4, plane = index / across / down;
  WinogradTile tile;
  const int64_t x = w - shape.padding[2], before = std::max<int64_t>(0, -x), after = shape.in[2] - x;
  for (int i = 0; i < 6; ++i) {
    const int64_t y = h + i - shape.padding[1];
    const bool inside = y >= 0 && y < shape.in[1];
    const uint8_t* row = q_x + ((plane * shape.in[1] + y) * shape.in[2] + x) * shape.channels;
    for (int j = 0; j < 6; ++j)
      tile.in[i * 6 + j] = inside && j >= before && j < after ? row + j * shape.channels : border;
  }
  tile.height = static_cast<int>(std::min<int64_t>(4, shape.out[1] - h));
  tile.width = static_cast<int>(std::min<int64_t>(4, shape.out[2] - w));
  for (int i = 0; i < tile.height; ++i)
    tile.out[i] = out + ((plane * shape.out[1] + h + i) * shape.out[2] + w) * shape.out_channels;
  return tile;
}

// run() leaves the outputs of the tiles where these say, or where a residual is added on the way: that may lie where the
// outputs go, and is read after they are computed.
template <class Run>
void leave_tiles(const StaticOutput& output, int64_t outputs, WinogradTile* tiles, int64_t count, Run run) {
  if (!output.residual) return run();
  int64_t places[kMostTiles][4];
  uint8_t* own = conv_workspace().unsummed.get(count * 16 * outputs);
  for (int64_t t = 0; t < count; ++t)
    for (int h = 0; h < tiles[t].height; ++h) {
      places[t][h] = tiles[t].out[h] - output.quantized;
      tiles[t].out[h] = own + (t * 16 + h * 4) * outputs;
    }
  run();
  for (int64_t t = 0; t < count; ++t)
    for (int h = 0; h < tiles[t].height; ++h)
      add_residual(output, tiles[t].out[h], places[t][h], tiles[t].width * outputs);
}

}  // namespace

bool PackedWinograd::serves(const ConvShape& shape) {
  const NativeWinograd* table = native_winograd();
  if (!table || shape.groups != 1 || shape.channels % table->channels || shape.out_channels < kLeastOutputs) return false;
  for (int axis = 0; axis < 3; ++axis)
    if (shape.kernel[axis] != (axis ? 3 : 1) || shape.stride[axis] != 1 || shape.dilation[axis] != 1) return false;
  return shape.in_planes() && tiles_of(shape) >= kTiles &&
         table->packed_bytes(shape.out_channels, shape.channels) <= kMostBytes;
}

PackedWinograd::PackedWinograd(const int8_t* weight, int64_t outputs, int64_t channels) : row_sums_(outputs) {
  const NativeWinograd* table = native_winograd();
  bool exact = table != nullptr;
  for (int64_t n = 0; n < outputs; ++n) {
    int64_t above = 0, below = 0;
    for (int64_t i = 0; i < channels * 9; ++i) {
      const int8_t w = weight[n * channels * 9 + i];
      (w > 0 ? above : below) += w;
    }
    row_sums_[n] = static_cast<int32_t>(above + below);
    exact &= 255 * std::max(above, -below) <= kMostSum;
  }
  if (!exact) return;
  packed_bytes_ = (table->packed_bytes(outputs, channels) + 63) / 64 * 64;
  packed_.reset(static_cast<int8_t*>(std::aligned_alloc(64, packed_bytes_)));
  if (!packed_) throw_no_memory(packed_bytes_, "a packed weight");
  table->pack(weight, outputs, channels, packed_.get());
}

int64_t PackedWinograd::bytes() const {
  return packed_bytes_ + static_cast<int64_t>(row_sums_.size() * sizeof(int32_t));
}

void PackedWinograd::Free::operator()(int8_t* memory) const { std::free(memory); }

void conv_winograd(const ConvShape& shape, const PackedWinograd& weight, const uint8_t* q_x, int32_t zero_point,
                   const int32_t* bias, const StaticOutput& output) {
  const NativeWinograd& kernel = *native_winograd();
  const Requantize by = requantize_of(output, shape.out_channels, zero_point, weight.row_sums(), bias);
  uint8_t* border = conv_workspace().border.get(shape.channels);
  std::memset(border, zero_point, shape.channels);
  const int64_t tiles = tiles_of(shape), products = shape.pixels() * shape.out_channels * shape.channels * 9;
  const int64_t threads = std::min(tiles, threads_for(products));
  each_thread(threads, [&](int64_t thread) {
    const int64_t begin = tiles * thread / threads, count = tiles * (thread + 1) / threads - begin;
    const int64_t blocks = (count + kMostTiles - 1) / kMostTiles;
    WinogradTile* block = conv_workspace().tiles.get(kMostTiles);
    uint8_t* scratch = conv_workspace().winograd.get(kernel.scratch_bytes(kMostTiles, shape.channels));
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = begin + count * b / blocks, last = begin + count * (b + 1) / blocks;
      for (int64_t t = first; t < last; ++t) block[t - first] = tile_at(shape, t, q_x, border, output.quantized);
      leave_tiles(output, shape.out_channels, block, last - first, [&] {
        kernel.run(block, last - first, shape.channels, weight.data(), shape.out_channels, by, scratch);
      });
    }
  });
}

}  // namespace octet

// The eight tile registers of AMX as one policy: the CPU's (`CpuTiles`), and arrays with the same semantics and the same faults
// (`EmulatedTiles`), so that a product which is written once over the policy is tested where no CPU has tiles.
//
// Inline assembly in the place of <immintrin.h>: g++ 12 pastes a register's number as text there, so that no template parameter
// can name one; its _tile_loadd says nothing of the memory that it reads, and its _tile_loadconfig names 8 of 64 bytes, so that
// stores may move behind them. It needs no flag of the compiler.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace octet {
namespace {

constexpr int kTileRows = 16, kTileBytes = 64;  // of the largest tile, and of each row

// What ldtilecfg reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
  void set(int tile, int64_t tile_rows, int64_t row_bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    bytes[tile] = static_cast<uint16_t>(row_bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

#define OCTET_TILE_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
struct CpuTiles {
  static OCTET_TILE_INLINE void configure(const TileConfig& c) { asm volatile("ldtilecfg %0" ::"m"(c)); }
  static OCTET_TILE_INLINE void release() { asm volatile("tilerelease"); }
  template <int T>
  static OCTET_TILE_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  static OCTET_TILE_INLINE void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  static OCTET_TILE_INLINE void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
  }
  // Asks for the line of `to`, as one that will be written. The compiler's own prefetch asks for one to read.
  static OCTET_TILE_INLINE void expect(const uint8_t* to) { asm volatile("prefetchw %0" ::"m"(*to)); }
  // C += A (u8) * B (s8)
  template <int C, int A, int B>
  static OCTET_TILE_INLINE void dot() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  // C += A (s8) * B (s8)
  template <int C, int A, int B>
  static OCTET_TILE_INLINE void signed_dot() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};
#endif

// Intel's manual, volume 2: LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBUSD, TDPBSSD. What faults there ends the process
// here, with a message: it is a mistake of ours.
struct EmulatedTiles {
  struct Registers {
    TileConfig config;
    bool configured = false;
    alignas(64) uint8_t data[8][kTileRows][kTileBytes];
  };
  static Registers& registers() {
    thread_local Registers r;
    return r;
  }
  [[noreturn]] static void fault(const char* what, int tile) {
    std::fprintf(stderr, "emulated AMX: %s (tile %d)\n", what, tile);
    std::abort();
  }
  static void configure(const TileConfig& c) {
    if (c.palette > 1) fault("#GP: palette", c.palette);
    for (int i = 0; i < 14; ++i)
      if (c.reserved[i]) fault("#GP: reserved bytes", i);
    for (int t = 0; t < 16; ++t) {
      if (t >= 8 && (c.rows[t] || c.bytes[t])) fault("#GP: palette 1 has eight tiles", t);
      if (c.rows[t] > kTileRows || c.bytes[t] > kTileBytes) fault("#GP: larger than a tile", t);
      if (!c.rows[t] != !c.bytes[t]) fault("#GP: rows without bytes or bytes without rows", t);
    }
    Registers& r = registers();
    r.config = c;
    r.configured = c.palette == 1;
    std::memset(r.data, 0, sizeof r.data);
  }
  static void release() { registers().configured = false; }
  static Registers& with(int tile) {
    Registers& r = registers();
    if (!r.configured) fault("#UD: this thread has no configuration", tile);
    if (!r.config.rows[tile]) fault("#UD: the configuration has no such tile", tile);
    return r;
  }
  template <int T>
  static void zero() {
    std::memset(with(T).data[T], 0, sizeof Registers::data[T]);
  }
  template <int T>
  static void load(const void* from, int64_t stride) {
    Registers& r = with(T);
    std::memset(r.data[T], 0, sizeof r.data[T]);
    for (int row = 0; row < r.config.rows[T]; ++row)
      std::memcpy(r.data[T][row], static_cast<const uint8_t*>(from) + row * stride, r.config.bytes[T]);
  }
  template <int T>
  static void store(void* to, int64_t stride) {
    Registers& r = with(T);
    for (int row = 0; row < r.config.rows[T]; ++row)
      std::memcpy(static_cast<uint8_t*>(to) + row * stride, r.data[T][row], r.config.bytes[T]);
  }
  static void expect(const uint8_t*) {}
  template <int C, int A, int B>
  static void dot() {
    products<C, A, B>([](uint8_t x) { return int32_t{x}; });
  }
  template <int C, int A, int B>
  static void signed_dot() {
    products<C, A, B>([](uint8_t x) { return int32_t{static_cast<int8_t>(x)}; });
  }

 private:
  template <int C, int A, int B, class Value>
  static void products(const Value& value) {
    static_assert(C != A && C != B && A != B, "#UD: the tiles must differ");
    Registers& r = with(C);
    with(A), with(B);
    const TileConfig& c = r.config;
    if (c.bytes[A] % 4 || c.bytes[B] % 4 || c.bytes[C] % 4) fault("#UD: not whole steps of four bytes", C);
    if (c.rows[C] != c.rows[A]) fault("#UD: rows of C and A", C);
    if (c.bytes[C] != c.bytes[B]) fault("#UD: columns of C and B", C);
    if (c.bytes[A] / 4 != c.rows[B]) fault("#UD: depth of A and B", C);
    for (int m = 0; m < c.rows[C]; ++m) {
      uint32_t sums[kTileBytes / 4];  // modulo 2**32, as the instruction adds
      std::memcpy(sums, r.data[C][m], sizeof sums);
      for (int k = 0; k < c.rows[B]; ++k)
        for (int n = 0; n < c.bytes[B] / 4; ++n)
          for (int i = 0; i < 4; ++i) {
            const int32_t x = value(r.data[A][m][4 * k + i]), w = static_cast<int8_t>(r.data[B][k][4 * n + i]);
            sums[n] += static_cast<uint32_t>(x * w);
          }
      std::memcpy(r.data[C][m], sums, sizeof sums);
    }
  }
};

// Tiles 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights.
template <class Tiles>
void configure(int64_t rows, int64_t step) {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, rows, kTileBytes);
  for (int tile = 4; tile < 6; ++tile) config.set(tile, rows, step);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, step / 4, kTileBytes);
  Tiles::configure(config);
}

}  // namespace
}  // namespace octet

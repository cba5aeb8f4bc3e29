// Elementwise operators that are functions of two bytes, as plans see them. binary.inc has every one of them.
#pragma once

#include <cstdint>

namespace octet {

// The settings of one operation, in a type that only its kind knows.
struct BinarySettings {
  alignas(8) unsigned char bytes[64];
};

struct BinaryKind {
  const char* line;  // null in the last; a line of plan/settings.inc: the name, and two inputs (u8) among single numbers
  // numbers: those of the settings, in the order of the line.
  void (*read)(const double* numbers, BinarySettings* settings);
  // out[i] = f(a[i * a_step], b[i * b_step]); a step is 1, or 0 where one value meets the whole row.
  void (*row)(const BinarySettings& settings, const uint8_t* a, int a_step, const uint8_t* b, int b_step, int64_t n,
              uint8_t* out);
};

}  // namespace octet

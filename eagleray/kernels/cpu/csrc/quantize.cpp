// Quantization of plain weights to codes of few bits, when they are loaded.
#include <algorithm>

#include "base.h"

namespace eagleray {
namespace {

constexpr int LIMIT_8 = 127;  // codes of 8 bits are a sign and a magnitude
constexpr int LOW_4 = -8, HIGH_4 = 7, ZERO_4 = 8;

// Round to the nearest integer, half to even. |x| is at most 2^21.
inline Floats round_to_integer(Floats x) { return x + 12582912.0f - 12582912.0f; }

inline Floats clamp(Floats x, float low, float high) {
  x = max(x, splat(low));
  return -max(-x, splat(-high));
}

// The number of the group of the largest magnitude, with its sign.
float largest(const float* x, int64_t size) {
  Floats high{}, low{};
  for (int64_t at = 0; at < size; at += LANES) high = max(high, load(x + at)), low = max(low, -load(x + at));
  const float above = highest(high), below = highest(low);
  return above >= below ? above : -below;
}

typedef uint8_t Codes __attribute__((vector_size(LANES)));

void store_codes(uint8_t* to, Ints codes) {
  Codes narrow = __builtin_convertvector(codes, Codes);
  std::memcpy(to, &narrow, sizeof narrow);
}

// The nearest float16, as bits. x is finite; beyond the largest float16 it becomes the largest.
uint16_t to_float16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  const uint16_t sign = uint16_t(word >> 16 & 0x8000);
  float magnitude = std::min(std::fabs(x), 65504.0f);
  if (magnitude < 0x1p-14f) return sign | uint16_t(magnitude * 0x1p24f + 12582912.0f - 12582912.0f);  // denormal
  std::memcpy(&word, &magnitude, 4);
  word += 0xfff + (word >> 13 & 1);
  return sign | uint16_t((word >> 13) - ((127 - 15) << 10));
}

// ---- 8 bits

uint16_t quantize_8(const float* x, int64_t size, uint8_t* codes) {
  const float scale = std::fabs(largest(x, size)) / LIMIT_8, inverse = scale > 0 ? 1 / scale : 0;
  for (int64_t at = 0; at < size; at += LANES) {
    Ints code = __builtin_convertvector(clamp(round_to_integer(load(x + at) * inverse), -LIMIT_8, LIMIT_8), Ints);
    Ints sign = code >> 31;  // all ones, or 0
    store_codes(codes + at, ((code ^ sign) - sign) | (sign & 0x80));
  }
  return to_float16(scale);
}

// ---- 4 bits

// The codes that a scale gives, and how well their multiple fits: the squared error is that of zeros minus `gain`.
struct Fit {
  float gain, scale;
};

Fit fit(const float* x, int64_t size, float inverse) {
  Floats products{}, squares{};
  for (int64_t at = 0; at < size; at += LANES) {
    Floats value = load(x + at), code = clamp(round_to_integer(value * inverse), LOW_4, HIGH_4);
    products += value * code;
    squares += code * code;
  }
  const float along = sum(products), length = sum(squares);
  return length > 0 ? Fit{along * along / length, along / length} : Fit{0, 0};
}

// The largest number becomes nearly -8, with a scale of either sign, because there are more negative codes. Of several
// scales that are a little larger or smaller, the one with the least squared error is taken.
uint16_t quantize_4(const float* x, int64_t size, uint8_t* codes) {
  constexpr int STEPS = 4;
  constexpr float STEP = 0.3f;
  const float extreme = largest(x, size);
  Fit best{-1, 0};
  float inverse = 0;
  for (int step = -STEPS; step <= STEPS && extreme != 0; step++) {
    const float candidate = (float(LOW_4) + STEP * float(step)) / extreme;
    const Fit fitted = fit(x, size, candidate);
    if (fitted.gain > best.gain) best = fitted, inverse = candidate;
  }
  for (int64_t at = 0; at < size; at += LANES) {
    Floats code = clamp(round_to_integer(load(x + at) * inverse), LOW_4, HIGH_4);
    store_codes(codes + at, __builtin_convertvector(code, Ints) + ZERO_4);
  }
  return to_float16(best.scale);
}

}  // namespace
}  // namespace eagleray

using namespace eagleray;

extern "C" void er_quantize(const void* weight, int64_t n, int64_t k, int bits, int64_t size, void* codes, void* scales,
                            int dtype, int num_threads) {
  constexpr int64_t MAX_SIZE = 128;
  const int64_t groups = k / size;
  with_type(dtype, [&](auto zero) {
    auto from = static_cast<const decltype(zero)*>(weight);
    run_phase(num_threads, [&](Shard shard) {
      Span own = range_of(shard, n * groups);
      alignas(64) float x[MAX_SIZE];
      for (int64_t group = own.begin; group < own.end; group++) {
        for (int64_t i = 0; i < size; i += LANES) store(x + i, load(from + group * size + i));
        uint8_t* to = static_cast<uint8_t*>(codes) + group * size;
        static_cast<uint16_t*>(scales)[group] = bits == 4 ? quantize_4(x, size, to) : quantize_8(x, size, to);
      }
    });
  });
}

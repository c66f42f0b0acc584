// Quantization of plain weights to codes of few bits, when they are loaded.
#include <algorithm>

#include "base.h"

namespace eagleray {
namespace {

constexpr int64_t MAX_BLOCK = 256, MAX_GROUPS = 8;  // inputs and groups of a block
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

float from_float16(uint16_t bits) {
  const uint32_t word = uint32_t(bits & 0x7fff) << 13;
  float magnitude;
  std::memcpy(&magnitude, &word, 4);
  magnitude *= 0x1p112f;  // the difference of the exponents' biases
  return bits & 0x8000 ? -magnitude : magnitude;
}

// ---- 8 bits

// The codes stand for all integers of 8 bits, plus a half, from the lowest number of the group to the highest. They are
// a sign and a magnitude.
void quantize_8(const float* x, int64_t size, uint8_t* codes, uint16_t* scale, uint16_t* offset) {
  constexpr float LOW = -128, HIGH = 127;
  Floats high = load(x), low = -high;
  for (int64_t at = 0; at < size; at += LANES) high = max(high, load(x + at)), low = max(low, -load(x + at));
  const float above = highest(high), below = -highest(low);
  *offset = to_float16(0.5f * above + 0.5f * below);
  const float middle = from_float16(*offset);
  *scale = to_float16(std::max(above - middle, middle - below) / (HIGH + 0.5f));
  const float step = from_float16(*scale), inverse = step > 0 ? 1 / step : 0;
  for (int64_t at = 0; at < size; at += LANES) {
    const Floats integer = clamp(round_to_integer((load(x + at) - middle) * inverse - 0.5f), LOW, HIGH);
    const Ints code = __builtin_convertvector(integer, Ints), sign = code >> 31;  // all ones, or 0
    store_codes(codes + at, (code ^ sign) | (sign & 0x80));
  }
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
float fit_scale(const float* x, int64_t size) {
  constexpr int STEPS = 4;
  constexpr float STEP = 0.3f;
  const float extreme = largest(x, size);
  Fit best{-1, 0};
  for (int step = -STEPS; step <= STEPS && extreme != 0; step++) {
    const float candidate = (float(LOW_4) + STEP * float(step)) / extreme;
    const Fit fitted = fit(x, size, candidate);
    if (fitted.gain > best.gain) best = fitted;
  }
  return best.scale;
}

// The nearest number of 7 bits, so that its multiple by at most MAX_MULTIPLE is a float16. x is not negative.
float round_divisor(float x) {
  constexpr float SMALLEST = 0x1p-24f, LARGEST = 4352;  // of float16, and so that multiples are below its largest
  if (x < 128 * SMALLEST) return std::nearbyint(x / SMALLEST) * SMALLEST;
  uint32_t word;
  x = std::min(x, LARGEST);
  std::memcpy(&word, &x, 4);
  word = (word + 0xffff + (word >> 17 & 1)) >> 17 << 17;
  std::memcpy(&x, &word, 4);
  return x;
}

// Write the codes that a scale gives, and return their squared error.
float encode_4(const float* x, int64_t size, float scale, uint8_t* codes) {
  const float inverse = scale != 0 ? 1 / scale : 0;
  Floats error{};
  for (int64_t at = 0; at < size; at += LANES) {
    const Floats value = load(x + at), code = clamp(round_to_integer(value * inverse), LOW_4, HIGH_4);
    const Floats rest = value - code * scale;
    error += rest * rest;
    store_codes(codes + at, __builtin_convertvector(code, Ints) + ZERO_4);
  }
  return sum(error);
}

// Quantize a block whose groups have scales that are multiples of one number. The largest is MAX_MULTIPLE times it. Of
// the multiples near a scale of the least squared error, the one with the least error is taken.
void quantize_4(const float* x, int64_t size, int64_t groups, uint8_t* codes, uint16_t* scales) {
  float wanted[MAX_GROUPS], largest = 0;
  for (int64_t group = 0; group < groups; group++) {
    wanted[group] = fit_scale(x + group * size, size);
    largest = std::max(largest, std::fabs(wanted[group]));
  }
  const float divisor = round_divisor(largest / MAX_MULTIPLE);
  for (int64_t group = 0; group < groups; group++, x += size, codes += size) {
    float best_error = INFINITY, best = 0;
    const int nearest = divisor > 0 ? int(std::lround(wanted[group] / divisor)) : 0;
    for (int multiple = nearest - 1; multiple <= nearest + 1; multiple++) {
      if (std::abs(multiple) > MAX_MULTIPLE) continue;
      const float error = encode_4(x, size, float(multiple) * divisor, codes);
      if (error < best_error) best_error = error, best = float(multiple) * divisor;
    }
    encode_4(x, size, best, codes);
    scales[group] = to_float16(best);
  }
}

}  // namespace
}  // namespace eagleray

using namespace eagleray;

extern "C" void er_quantize(const void* weight, int64_t n, int64_t k, int bits, int64_t size, int64_t block, void* codes,
                            void* scales, void* offsets, int dtype, int num_threads) {
  const int64_t blocks = k / block, groups = block / size;  // of a row, and of a block
  with_type(dtype, [&](auto zero) {
    auto from = static_cast<const decltype(zero)*>(weight);
    run_phase(num_threads, [&](Shard shard) {
      Span own = range_of(shard, n * blocks);
      alignas(64) float x[MAX_BLOCK];
      for (int64_t at = own.begin; at < own.end; at++) {
        for (int64_t i = 0; i < block; i += LANES) store(x + i, load(from + at * block + i));
        uint8_t* to = static_cast<uint8_t*>(codes) + at * block;
        uint16_t* of_groups = static_cast<uint16_t*>(scales) + at * groups;
        if (bits == 4) quantize_4(x, size, groups, to, of_groups);
        else quantize_8(x, size, to, of_groups, static_cast<uint16_t*>(offsets) + at);
      }
    });
  });
}

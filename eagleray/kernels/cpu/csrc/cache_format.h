// The numbers in a cache of keys and values: those of the model, or codes of 8 bits.
//
// Codes have a scale for each token and head, one for the key and one for the value, so that what is cached of a token
// depends on this token alone. A scale is a bfloat16 number by which the codes are multiplied:
//
//   int8  whole numbers from -127 to 127.
//   fp8   float8 e4m3 from -448 to 448, without numbers between 0 and 2^-6, which are less than 4e-5 of the largest.
//
// Queries, and probabilities times the scales of their values, are converted before they are multiplied with codes: each
// row is divided by its largest magnitude, and the result is multiplied by a factor that makes up for it. For int8 they
// become whole numbers of 16 bits, and their sums are exact: 256 x 127 x 32767 fits into 32 bits. For fp8 they stay
// float32.
#pragma once

#include "attention.h"
#include "product_tile.h"

namespace eagleray {

constexpr float LEAST_MAGNITUDE = 1e-30f;  // numbers below it are cached as zeros

// The largest magnitude of whole vectors of numbers. It is NaN if one of them is infinite or NaN.
inline float magnitude(const float* x, int64_t size) {
  Floats highest = {}, poison = {};
  for (int64_t i = 0; i < size; i += LANES) {
    const Floats part = load(x + i);
    highest = max((Floats)((Words)part & 0x7fffffff), highest);
    poison += part - part;
  }
  return max_lane(highest) + sum(poison);
}

// The scale by which the largest of some numbers is at most `limit`: the next bfloat16 that is not below; 0 for numbers
// that are cached as zeros, and NaN for NaN.
inline Bf16 scale_of(float most, float limit) {
  if (!(most >= LEAST_MAGNITUDE)) return to_bf16(most == most ? 0.0f : most);
  const float exact = most / limit;
  uint32_t word;
  std::memcpy(&word, &exact, sizeof word);
  return Bf16{uint16_t((word + 0xffff) >> 16)};
}

template <class T>
struct PlainCache {
  using Stored = T;  // element of the cache
  using Number = T;  // of queries and probabilities
  static constexpr bool HAS_SCALES = false;

  static Register<T> decode(const T* from) { return read<Register<T>>(from); }
};

struct Int8Cache {
  using Stored = int8_t;
  using Number = Int16;
  static constexpr bool HAS_SCALES = true;
  static constexpr float LARGEST = 127;

  static Shorts decode(const int8_t* from) { return widen(from); }

  static Int8s encode(Floats x) { return __builtin_convertvector(round_to_ints(x), Int8s); }

  // Convert whole vectors of numbers whose largest magnitude is `most`, and return the factor of the results.
  static float convert(const float* x, int64_t size, float most, Int16* to) {
    const float scale = 32767 / most;
    for (int64_t i = 0; i < size; i += LANES) {
      const Int16s numbers = __builtin_convertvector(round_to_ints(load(x + i) * scale), Int16s);
      std::memcpy((void*)(to + i), &numbers, sizeof numbers);
    }
    return most / 32767;
  }
};

// The bits of a code are put where a float has its sign, the end of its exponent, and the begin of its mantissa. So a
// code is decoded as its number times 2^-120, for which the other numbers make up.
struct Fp8Cache {
  using Stored = int8_t;
  using Number = Paired;
  static constexpr bool HAS_SCALES = true;
  static constexpr float LARGEST = 448;

  static PairOfSums decode(const int8_t* from) {
    const Bits halves = (Bits)((widen(from) << 4) & (int16_t)0x87f0);
    return {(Sums)(halves << 16), (Sums)(halves & 0xffff0000u)};
  }

  static Int8s encode(Floats x) {
    const Words sign = (Words)x >> 24 & 0x80, bits = (Words)x & 0x7fffffff;
    const Words rounded = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;  // to 3 bits of mantissa, ties to even
    const Floats least = splat(0x1p-6f), size = (Floats)bits;
    const Floats small = select_below(splat(0x1p-7f), size, (Floats)(Words{} + 8), Floats{});  // 2^-6 or 0
    const Words code = (Words)select_below(size, least, small, (Floats)(rounded - (127 - 7) * 8));
    return __builtin_convertvector(code | sign, Int8s);
  }

  // As that of Int8Cache. The factor is a power of 2, so nothing is rounded.
  static float convert(const float* x, int64_t size, float most, Paired* to) {
    uint32_t word;
    std::memcpy(&word, &most, sizeof word);
    word &= 0x7f800000;  // the mantissa is 1
    float power;
    std::memcpy(&power, &word, sizeof power);
    const float inverse = 1 / power;
    for (int64_t i = 0; i < size; i += LANES) store(&to[i].value, load(x + i) * inverse * 0x1p117f);
    return power * 0x1p3f;
  }
};

// Convert a row of queries or probabilities, in whole vectors, for products with codes. Returns the factor by which the
// results must be multiplied: NaN if a number is infinite or NaN, and 1 for zeros, since a hidden score of -inf times 0
// would be NaN.
template <class Format>
__attribute__((noinline)) float convert_numbers(const float* x, int64_t size, typename Format::Number* to) {
  const float most = magnitude(x, size);
  if (most >= LEAST_MAGNITUDE) return Format::convert(x, size, most, to);
  std::memset((void*)to, 0, size_t(size) * sizeof *to);
  return most == most ? 1 : most;
}

// Quantize whole vectors of numbers, and return their scale.
template <class Format>
__attribute__((noinline)) Bf16 quantize_numbers(const float* x, int64_t size, int8_t* codes) {
  const Bf16 scale = scale_of(magnitude(x, size), Format::LARGEST);
  const float divisor = to_float(scale);
  if (!(divisor > 0)) {
    std::memset(codes, 0, size_t(size));
    return scale;
  }
  for (int64_t i = 0; i < size; i += LANES) {
    const Int8s part = Format::encode(load(x + i) / divisor);
    std::memcpy(codes + i, &part, sizeof part);
  }
  return scale;
}

// Call `work` with the format of the cache of a model whose numbers are T.
template <class T, class Work>
void with_format(int64_t cache_format, Work&& work) {
  if (cache_format == CACHE_INT8) work(Int8Cache{});
  else if (cache_format == CACHE_FP8) work(Fp8Cache{});
  else work(PlainCache<T>{});
}

}  // namespace eagleray

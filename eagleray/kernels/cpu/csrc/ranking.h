// The highest of each row of logits [n, size].
//
// The order is total: higher logits first, equal ones by id, -0 equals 0, and NaN is above all (as in torch), so that
// whoever looks at the highest sees it. No row is sorted.
//
// The threads divide pieces of rows, then rows: all threads of the crew call.
#pragma once

#include "base.h"

namespace eagleray {

// Bytes of memory that each function below needs to work in, where a multiple of 8 begins.
int64_t ranking_scratch_size(int64_t num_rows, int64_t size);

// ids, values [num_rows]: the first of each row.
void argmax(Crew& crew, const float* logits, int64_t stride, int64_t num_rows, int64_t size, int32_t* ids,
            float* values, void* scratch);

// ids, values [num_rows, k]: the first k of each row, k at most MAX_TOP_K and the row's size.
void top_k(Crew& crew, const float* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t k,
           int32_t* ids, float* values, void* scratch);

// ---- order as integers

inline int32_t order(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  if (x != x) return INT32_MAX;
  return int32_t(word >> 31 ? 0x80000000u - word : word);
}

// The same in arithmetic: where vectors are shorter, GCC compares lane by lane.
inline Ints order(Floats x) {
  Ints word;
  std::memcpy(&word, &x, sizeof word);
  Ints negative = word >> 31, magnitude = word & 0x7fffffff, nan = (0x7f800000 - magnitude) >> 31;  // all ones, or 0
  return (((magnitude ^ negative) - negative) & ~nan) | (nan & 0x7fffffff);
}

}  // namespace eagleray

// The highest logits of each row of [n, size].
//
// The order is total: higher logits first, equal ones by id, -0 equals 0, and NaN is above all (as in torch), so that a
// NaN is noticed in the highest logit. Rows are not sorted.
//
// The shards divide pieces of rows, then rows. All threads of the team call these functions.
#pragma once

#include "base.h"

namespace eagleray {

// The number of bytes of scratch that each function below needs, at an address that is a multiple of 8.
int64_t ranking_scratch_size(int64_t num_rows, int64_t size);

// ids, values [num_rows]: the highest logit of each row.
void argmax(Team& team, const float* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t* ids,
            float* values, void* scratch);

// ids, values [num_rows, k]: the k highest logits of each row in order; k is at most MAX_TOP_K and the row's size.
void top_k(Team& team, const float* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t k,
           int32_t* ids, float* values, void* scratch);

// Set the logits of row rows[i] whose bit in masks[i] is 0 to minus infinity, and find the highest logit of each row
// before and after that. rows: [num_masks], ascending; masks: [num_masks, ceil(size / 32)]. ids, values [num_rows]: the
// highest logit that is left; unmasked [num_rows]: the highest one before.
void argmax_allowed(Team& team, float* logits, int64_t stride, int64_t num_rows, int64_t size, const int64_t* rows,
                    int64_t num_masks, const int32_t* masks, int64_t* ids, float* values, float* unmasked,
                    void* scratch);

// ---- one row, for the functions of other files. Only the calling thread works.

// Logits of a block. Of a row, only the k blocks with the highest logits are read again to find the k highest.
constexpr int64_t RANKED_BLOCK = 64;

// highest [ceil(size / RANKED_BLOCK)]: the highest key of each block of a row, or of a part that begins with a block.
void rank_blocks(const float* x, int64_t size, int32_t* highest);

// ids, values [k]: the k highest logits of a row in order. highest: of the row, see `rank_blocks`.
void top_k_of_row(const float* row, int64_t size, const int32_t* highest, int64_t k, int32_t* ids, float* values);

// ---- integers whose order is that of the logits

inline int32_t order_key(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  if (x != x) return INT32_MAX;
  return int32_t(word >> 31 ? 0x80000000u - word : word);
}

// The same by arithmetic, because GCC compares lane by lane if a vector is longer than a register.
inline Ints order_key(Floats x) {
  Ints word;
  std::memcpy(&word, &x, sizeof word);
  Ints negative = word >> 31, magnitude = word & 0x7fffffff, nan = (0x7f800000 - magnitude) >> 31;  // all ones, or 0
  return (((magnitude ^ negative) - negative) & ~nan) | (nan & 0x7fffffff);
}

// A number with this key: NaN and 0 stand for all that have theirs.
inline float number_of(int32_t key) {
  uint32_t word = key < 0 ? 0x80000000u - uint32_t(key) : uint32_t(key);
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

}  // namespace eagleray

// Tiles by the matrix instructions of processors that have them (AMX), for products of bfloat16.
//
// Such an instruction adds the product of up to 16 rows of inputs with 16 outputs of the weight, over STEP_PAIRS pairs of
// k, to 16 x 16 sums. A packed panel is already in its order. Every number of rows is computed by these instructions,
// and k is divided into the same steps for each, so that a row's sums have the same bits in any company.
#pragma once

#include "product_tile.h"

#ifdef HAS_MATRICES

namespace eagleray {

constexpr int64_t STEP_PAIRS = 16;
constexpr int MATRIX_ROWS = 16;
constexpr int64_t STEP_SIZE = MATRIX_ROWS * STEP_PAIRS * 2;  // elements of 16 rows
constexpr int64_t PAIR_BYTES = PANEL * 4;                    // of a panel
constexpr int64_t NEAR_BYTES = STEP_PAIRS * PAIR_BYTES;      // distance of prefetching into the first-level cache

// Registers: the sums of the lower and the upper 16 rows with both halves of the panel, the rows, and the halves. They
// are macros because the compiler's intrinsics write them into the assembly.
#define LOW_FIRST 0
#define LOW_SECOND 1
#define HIGH_FIRST 2
#define HIGH_SECOND 3
#define LOW_ROWS 4
#define HIGH_ROWS 5
#define FIRST_HALF 6
#define SECOND_HALF 7

// In products of integers, see integer_tile.h: the sums of two matrices of rows, which are both bytes of 16 rows or the
// upper bytes of 32, with both halves of the panel, the rows, and the panel.
#define FIRST_SUMS_1 0
#define FIRST_SUMS_2 1
#define SECOND_SUMS_1 2
#define SECOND_SUMS_2 3
#define ROWS_1 4
#define ROWS_2 5
#define FIRST_BYTES 6
#define SECOND_BYTES 7

// In attention: four times 16 totals of each row, the rows, and what they are multiplied with.
#define TOTALS_0 0
#define TOTALS_1 1
#define TOTALS_2 2
#define TOTALS_3 3
#define QUERIES 4
#define PROBABILITIES 5
#define KEYS 6
#define VALUES 7

// The sizes of the matrix registers.
class MatrixSizes {
 public:
  void set(int index, int64_t rows, int64_t row_bytes) {
    sizes_.rows[index] = uint8_t(rows), sizes_.row_bytes[index] = uint16_t(row_bytes);
  }
  void load() const {
    asm volatile("" ::"m"(sizes_));  // GCC takes the instruction to read no more than 8 bytes
    _tile_loadconfig(&sizes_);
  }

 private:
  struct {
    uint8_t palette = 1, reserved[15] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } sizes_;
};

// The matrix registers of this thread, which keeps them from one product of a pass to the next.
class MatrixRegisters {
 public:
  // Size them for products of `low` and `high` rows in steps of `pairs` pairs. What they hold is lost.
  static void size_for_product(int64_t low, int64_t high, int64_t pairs) {
    resize(low << 16 | high << 8 | pairs, [=](MatrixSizes& sizes) {
      for (int index : {LOW_FIRST, LOW_SECOND}) sizes.set(index, low, 64);
      sizes.set(LOW_ROWS, low, 4 * pairs);
      for (int index : {FIRST_HALF, SECOND_HALF}) sizes.set(index, pairs, 64);
      if (high == 0) return;
      for (int index : {HIGH_FIRST, HIGH_SECOND}) sizes.set(index, high, 64);
      sizes.set(HIGH_ROWS, high, 4 * pairs);
    });
  }

  // Size them for products with weights of few bits, see matrix_groups.h, of `low` and `high` rows in steps of `pairs`
  // pairs. What they hold is lost.
  static void size_for_columns(int64_t low, int64_t high, int64_t pairs) {
    resize(int64_t(2) << 32 | low << 16 | high << 8 | pairs, [=](MatrixSizes& sizes) {
      for (int index : {LOW_FIRST, LOW_SECOND}) sizes.set(index, LANES, 4 * low);
      sizes.set(LOW_ROWS, pairs, 4 * low);
      for (int index : {FIRST_HALF, SECOND_HALF}) sizes.set(index, LANES, 4 * pairs);
      if (high == 0) return;
      for (int index : {HIGH_FIRST, HIGH_SECOND}) sizes.set(index, LANES, 4 * high);
      sizes.set(HIGH_ROWS, pairs, 4 * high);
    });
  }

  // Size them for attention of some rows, see matrix_attention.h. What they hold is lost.
  static void size_for_attention(int64_t rows) {
    resize(int64_t(1) << 32 | rows, [=](MatrixSizes& sizes) {
      for (int index : {TOTALS_0, TOTALS_1, TOTALS_2, TOTALS_3}) sizes.set(index, rows, 64);
      sizes.set(QUERIES, rows, 64);
      sizes.set(PROBABILITIES, rows, 32);
      sizes.set(KEYS, 16, 64);
      sizes.set(VALUES, 8, 64);
    });
  }

  // Size them for products of some rows of integers, see integer_tile.h. What they hold is lost.
  static void size_for_integers(int64_t rows) {
    resize(int64_t(3) << 32 | rows, [=](MatrixSizes& sizes) {
      for (int index : {FIRST_SUMS_1, FIRST_SUMS_2, SECOND_SUMS_1, SECOND_SUMS_2}) sizes.set(index, rows, 64);
      for (int index : {ROWS_1, ROWS_2}) sizes.set(index, rows, 64);
      for (int index : {FIRST_BYTES, SECOND_BYTES}) sizes.set(index, 16, 64);
    });
  }

  // Give them back, see `release_matrices` in base.h.
  static void release() {
    if (current() == 0) return;
    current() = 0;
    _tile_release();
  }

 private:
  template <class Describe>
  static void resize(int64_t wanted, Describe&& describe) {
    if (current() == wanted) return;
    current() = wanted;
    MatrixSizes sizes;
    describe(sizes);
    sizes.load();
  }

  static int64_t& current() {
    static thread_local int64_t sizes = 0;  // 0: they are not in use
    return sizes;
  }
};

// The rows of a tile: at equal distances, or interleaved by steps, [steps][16][STEP_PAIRS][2] for the lower 16 rows and
// then for the upper ones, with zeros where k ends.
struct MatrixRows {
  const Bf16* low;
  const Bf16* high;
  int64_t row_bytes, step;  // the distance of rows, in bytes, and that of steps, in elements

  MatrixRows(const Bf16* const* x, int64_t rows, bool is_interleaved, int64_t all_pairs, int64_t first_pair) {
    if (is_interleaved) {
      const int64_t half = divide_up(all_pairs, STEP_PAIRS) * STEP_SIZE;
      low = x[0] + first_pair / STEP_PAIRS * STEP_SIZE, high = low + half;
      row_bytes = STEP_PAIRS * 4, step = STEP_SIZE;
    } else {
      low = x[0] + first_pair * 2, high = rows > MATRIX_ROWS ? x[MATRIX_ROWS] + first_pair * 2 : low;
      row_bytes = rows > 1 ? reinterpret_cast<const char*>(x[1]) - reinterpret_cast<const char*>(x[0]) : 64;
      step = STEP_PAIRS * 2;
    }
  }

  MatrixRows from(int64_t first) const {
    MatrixRows rest = *this;
    rest.low += first * step, rest.high += first * step;
    return rest;
  }
};

// See product_tile.h, as for `multiply_rows`.
inline void interleave_rows(const Bf16* const* x, int64_t rows, int64_t pairs, Bf16* to) {
  const int64_t steps = divide_up(pairs, STEP_PAIRS);
  for (int64_t row = 0; row < rows; row++) {
    Bf16* at = to + (row / MATRIX_ROWS * steps * MATRIX_ROWS + row % MATRIX_ROWS) * STEP_PAIRS * 2;
    for (int64_t step = 0; step < steps; step++, at += STEP_SIZE) {
      const int64_t count = std::min(STEP_PAIRS, pairs - step * STEP_PAIRS);
      Words words{};
      std::memcpy(&words, x[row] + step * STEP_PAIRS * 2, size_t(4 * count));
      std::memcpy(at, &words, sizeof words);
    }
  }
}

// Prefetch what belongs to `pairs` pairs: the weight's next lines into the first-level cache, where a matrix is loaded from
// without delay, and memory that is read later into the second-level cache.
template <class Ahead>
inline void fetch_pairs(const char*& near, Ahead& far, int64_t pairs) {
  for (const char* end = near + pairs * PAIR_BYTES; near < end; near += CACHE_LINE) __builtin_prefetch(near);
  fetch_to_second_level(far, pairs);
}

// Add the products of `steps` steps to sums [rows, PANEL], or begin them.
template <bool HAS_HIGH, class Ahead>
inline void multiply_steps(MatrixRows x, const Bf16* weight, int64_t steps, int64_t pairs, float* sums, bool resume,
                           Ahead& prefetch) {
  constexpr int64_t WEIGHT_BYTES = PAIR_BYTES, SUM_BYTES = PANEL * 4;
  float* upper = sums + MATRIX_ROWS * PANEL;
  if (resume) {
    _tile_loadd(LOW_FIRST, sums, SUM_BYTES);
    _tile_loadd(LOW_SECOND, sums + LANES, SUM_BYTES);
    if (HAS_HIGH) {
      _tile_loadd(HIGH_FIRST, upper, SUM_BYTES);
      _tile_loadd(HIGH_SECOND, upper + LANES, SUM_BYTES);
    }
  } else {
    _tile_zero(LOW_FIRST);
    _tile_zero(LOW_SECOND);
    if (HAS_HIGH) {
      _tile_zero(HIGH_FIRST);
      _tile_zero(HIGH_SECOND);
    }
  }
  // A core has few places for lines on their way, so a quarter of a step's lines is requested before each load.
  const int64_t half = pairs / 2, quarter = half / 2;
  const char* near = reinterpret_cast<const char*>(weight) + NEAR_BYTES;
  for (int64_t step = 0; step < steps; step++, x = x.from(1), weight += STEP_PAIRS * PANEL * 2) {
    fetch_pairs(near, prefetch, quarter);
    _tile_loadd(FIRST_HALF, weight, WEIGHT_BYTES);
    fetch_pairs(near, prefetch, half - quarter);
    _tile_loadd(LOW_ROWS, x.low, x.row_bytes);
    fetch_pairs(near, prefetch, quarter);
    _tile_loadd(SECOND_HALF, weight + LANES * 2, WEIGHT_BYTES);
    fetch_pairs(near, prefetch, pairs - half - quarter);
    _tile_dpbf16ps(LOW_FIRST, LOW_ROWS, FIRST_HALF);
    _tile_dpbf16ps(LOW_SECOND, LOW_ROWS, SECOND_HALF);
    if (HAS_HIGH) {
      _tile_loadd(HIGH_ROWS, x.high, x.row_bytes);
      _tile_dpbf16ps(HIGH_FIRST, HIGH_ROWS, FIRST_HALF);
      _tile_dpbf16ps(HIGH_SECOND, HIGH_ROWS, SECOND_HALF);
    }
  }
  _tile_stored(LOW_FIRST, sums, SUM_BYTES);
  _tile_stored(LOW_SECOND, sums + LANES, SUM_BYTES);
  if (HAS_HIGH) {
    _tile_stored(HIGH_FIRST, upper, SUM_BYTES);
    _tile_stored(HIGH_SECOND, upper + LANES, SUM_BYTES);
  }
}

// Only the last part of k has a rest of less than a step.
template <class Ahead>
inline void multiply_rows(const Bf16* const* x, int64_t rows, bool is_interleaved, int64_t all_pairs, Span pairs,
                          const Bf16* weight, float* sums, Ahead prefetch) {
  const MatrixRows matrix(x, rows, is_interleaved, all_pairs, pairs.begin);
  const int64_t low_rows = std::min<int64_t>(rows, MATRIX_ROWS), high_rows = rows - low_rows;
  const int64_t steps = (pairs.end - pairs.begin) / STEP_PAIRS, rest = (pairs.end - pairs.begin) % STEP_PAIRS;
  auto multiply = [&](int64_t first, int64_t count, int64_t step_pairs) {
    MatrixRegisters::size_for_product(low_rows, high_rows, step_pairs);
    auto multiply_half = high_rows ? multiply_steps<true, Ahead> : multiply_steps<false, Ahead>;
    multiply_half(matrix.from(first), weight + first * STEP_PAIRS * PANEL * 2, count, step_pairs, sums,
                  pairs.begin > 0 || first > 0, prefetch);
  };
  if (steps) multiply(0, steps, STEP_PAIRS);
  if (rest) multiply(steps, 1, rest);
}

}  // namespace eagleray

#endif

// The products of attention by matrix instructions, see matrix_tile.h: 16 rows with 16 tokens, or 16 features, at a time.
//
// Every number of rows is multiplied by these instructions. Slices that a row does not see add products with 0.
#pragma once

#include "attention_tile.h"
#include "matrix_tile.h"

#ifdef HAS_MATRICES

namespace eagleray {
namespace {

constexpr int64_t MATRICES = 4;  // of totals at a time: slices of keys, or vectors of features

// Prefetch `pairs` pairs of a matrix, 64 bytes of each: `next` into the first-level cache, and `later` into the second-level
// cache; nothing if `later` is null. A core has few places for lines on their way, so a matrix is fetched before each load
// instead of all at once. GCC takes a function that only prefetches to have no effect, and drops calls that it has not
// inlined.
__attribute__((always_inline)) inline void fetch_matrix(const Bf16* next, const Bf16* later, int64_t step, int64_t pairs) {
  if (!later) return;
  for (int64_t pair = 0; pair < pairs; pair++) __builtin_prefetch(later + pair * step, 0, 2);
  for (int64_t pair = 0; pair < pairs; pair++) __builtin_prefetch(next + pair * step);
}

// scores [rows][MATRICES slices] = queries . keys; `step` is the distance between pairs of features. rows: at most 16.
// `later` are the slices to prefetch, or null.
inline void multiply_keys(const Bf16* queries, int64_t rows, const Bf16* const* keys, const Bf16* const* later,
                          int64_t step, int64_t size, float* scores) {
  MatrixRegisters::size_for_attention(rows);
  _tile_zero(TOTALS_0);
  _tile_zero(TOTALS_1);
  _tile_zero(TOTALS_2);
  _tile_zero(TOTALS_3);
  for (int64_t feature = 0, offset = 0; feature < size; feature += 2 * STEP_PAIRS, offset += STEP_PAIRS * step) {
    const int64_t next = offset + STEP_PAIRS * step;  // the values follow the last keys
    auto fetch = [&](int64_t n) __attribute__((always_inline)) {
      fetch_matrix(keys[n] + next, later ? later[n] + offset : nullptr, step, STEP_PAIRS);
    };
    _tile_loadd(QUERIES, queries + feature, MAX_HEAD_DIM * 2);
    fetch(0);
    _tile_loadd(KEYS, keys[0] + offset, step * 2);
    _tile_dpbf16ps(TOTALS_0, QUERIES, KEYS);
    fetch(1);
    _tile_loadd(KEYS, keys[1] + offset, step * 2);
    _tile_dpbf16ps(TOTALS_1, QUERIES, KEYS);
    fetch(2);
    _tile_loadd(KEYS, keys[2] + offset, step * 2);
    _tile_dpbf16ps(TOTALS_2, QUERIES, KEYS);
    fetch(3);
    _tile_loadd(KEYS, keys[3] + offset, step * 2);
    _tile_dpbf16ps(TOTALS_3, QUERIES, KEYS);
  }
  _tile_stored(TOTALS_0, scores, CHUNK_LANES * 4);
  _tile_stored(TOTALS_1, scores + LANES, CHUNK_LANES * 4);
  _tile_stored(TOTALS_2, scores + 2 * LANES, CHUNK_LANES * 4);
  _tile_stored(TOTALS_3, scores + 3 * LANES, CHUNK_LANES * 4);
}

// out [rows][VECTORS vectors from `feature` on] = probabilities . values of some slices; `step` is the distance between
// pairs of tokens. `later` are the slices to prefetch, or null.
template <int VECTORS>
inline void multiply_values(const Bf16* probabilities, int64_t rows, const Bf16* const* values,
                            const Bf16* const* later, Span slices, int64_t step, int64_t feature, float* out) {
  MatrixRegisters::size_for_attention(rows);
  _tile_zero(TOTALS_0);
  if (VECTORS > 1) {
    _tile_zero(TOTALS_1);
    _tile_zero(TOTALS_2);
    _tile_zero(TOTALS_3);
  }
  for (int64_t slice = slices.begin; slice < slices.end; slice++) {
    const Bf16* from = values[slice] + feature * 2;
    const Bf16* next = values[std::min(slice + 1, slices.end - 1)];
    auto fetch = [&](int64_t n) __attribute__((always_inline)) {
      const int64_t at = (feature + n * LANES) * 2;
      fetch_matrix(next + at, later ? later[slice] + at : nullptr, step, LANES / 2);
    };
    _tile_loadd(PROBABILITIES, probabilities + slice * LANES, CHUNK_LANES * 2);
    fetch(0);
    _tile_loadd(VALUES, from, step * 2);
    _tile_dpbf16ps(TOTALS_0, PROBABILITIES, VALUES);
    if (VECTORS > 1) {
      fetch(1);
      _tile_loadd(VALUES, from + LANES * 2, step * 2);
      _tile_dpbf16ps(TOTALS_1, PROBABILITIES, VALUES);
      fetch(2);
      _tile_loadd(VALUES, from + 2 * LANES * 2, step * 2);
      _tile_dpbf16ps(TOTALS_2, PROBABILITIES, VALUES);
      fetch(3);
      _tile_loadd(VALUES, from + 3 * LANES * 2, step * 2);
      _tile_dpbf16ps(TOTALS_3, PROBABILITIES, VALUES);
    }
  }
  out += feature;
  _tile_stored(TOTALS_0, out, RESULT_SIZE * 4);
  if (VECTORS > 1) {
    _tile_stored(TOTALS_1, out + LANES, RESULT_SIZE * 4);
    _tile_stored(TOTALS_2, out + 2 * LANES, RESULT_SIZE * 4);
    _tile_stored(TOTALS_3, out + 3 * LANES, RESULT_SIZE * 4);
  }
}

}  // namespace
}  // namespace eagleray

#endif

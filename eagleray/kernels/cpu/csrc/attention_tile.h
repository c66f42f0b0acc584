// The products and the softmax of a tile: several rows by several slices of the cache.
//
// A row is the query of one token and head. A slice is 16 lanes of a block. A row's numbers come from the same
// operations in the same order, however many rows and slices are computed together: slices that a row does not see have
// probability 0, and adding 0 changes nothing.
#pragma once

#include <algorithm>

#include "cache_format.h"

namespace eagleray {
namespace {

constexpr int64_t CHUNK_SLICES = 16;
constexpr int64_t CHUNK_LANES = CHUNK_SLICES * LANES;  // one softmax
constexpr int64_t RESULT_SIZE = MAX_HEAD_DIM + LANES;  // of a row: features, then 16 sums of its probabilities
constexpr float NO_SCORE = -1e30f;                     // highest score of no keys: below every score, and finite

// Slices that are read alternately: a processor reads well from about this many pages of memory at a time.
constexpr int64_t SLICES_AT_ONCE = 4;

// Rows x vectors of 16 results that fit into the registers; fewer rows leave room for more vectors.
constexpr int PARTS = LANES / WIDTH;  // registers of a vector
constexpr int MAX_ROWS = PARTS == 1 ? 6 : PARTS == 2 ? 4 : 2, VECTORS = PARTS == 1 ? 4 : 1;
constexpr int FEW_ROWS = PARTS == 1 ? 3 : PARTS == 2 ? 2 : 1, MANY_VECTORS = 2 * VECTORS;

template <int N>
using Count = std::integral_constant<int, N>;

// Call f(row, Count<M>), M at most MOST, until all rows are covered. The last call may exceed the end by one row.
template <int MOST = MAX_ROWS, class F>
inline void for_rows(Span rows, F&& f) {
  constexpr int ENOUGH = MOST > 4 ? MOST - 1 : MOST;
  for (; rows.end - rows.begin >= ENOUGH; rows.begin += MOST) f(rows.begin, Count<MOST>());
  if constexpr (MOST > 1) for_rows<(MOST > 4 ? 4 : MOST - 1)>(rows, f);
}

// ---- products. While slices are read, later ones are prefetched from memory.

template <class T, int M, int N>
struct Totals {
  SumsOf<T> of[M][N * PARTS];

  Totals() {
    for (int m = 0; m < M; m++)
      for (int i = 0; i < N * PARTS; i++) of[m][i] = SumsOf<T>{};
  }

  // Row m += a[m * row_step] * b, where an element of a is a pair and b has N vectors.
  void add(const T* a, int64_t row_step, const Register<T> (&b)[N * PARTS]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      Register<T> pair = splat_to(Register<T>{}, a + m * row_step);
#pragma GCC unroll 16
      for (int i = 0; i < N * PARTS; i++) of[m][i] = add_products(of[m][i], pair, b[i]);
    }
  }

  void write(float* out, int64_t row_step) const {
    for (int m = 0; m < M; m++)
      for (int i = 0; i < N * PARTS; i++) {
        const Sums part = __builtin_convertvector(of[m][i], Sums);
        std::memcpy(out + m * row_step + i * WIDTH, &part, sizeof part);
      }
  }

  // The same, multiplied by a factor for each row.
  void write(float* out, int64_t row_step, const float* factors) const {
    for (int m = 0; m < M; m++)
      for (int i = 0; i < N * PARTS; i++) {
        const Sums part = __builtin_convertvector(of[m][i], Sums) * factors[m];
        std::memcpy(out + m * row_step + i * WIDTH, &part, sizeof part);
      }
  }
};

// scores[M][N slices] = queries[M] . keys[N]; `step` is the distance between pairs of features.
template <class Format, int M, int N, class T = typename Format::Number, class Stored = typename Format::Stored>
__attribute__((noinline)) void multiply_keys(const T* queries, const Stored* const* keys, const Stored* const* later,
                                             int64_t step, int64_t size, float* scores) {
  Totals<T, M, N> totals;
  const Stored *from[N], *fetch[N];
  for (int n = 0; n < N; n++) from[n] = keys[n], fetch[n] = later[n];
  int64_t i = 0, offset = 0;
  do {
    Register<T> b[N * PARTS];
#pragma GCC unroll 16
    for (int n = 0; n < N * PARTS; n++)
      b[n] = Format::decode(from[n / PARTS] + offset + n % PARTS * WIDTH * PAIR<T>);
    for (int n = 0; n < N; n++) __builtin_prefetch(fetch[n] + offset);
    totals.add(queries + i, MAX_HEAD_DIM, b);
    i += PAIR<T>, offset += step;
  } while (i < size);
  totals.write(scores, CHUNK_LANES);
}

// Call f(slice, lane, offset of its pair) in the order in which values are added up.
template <class T, class F>
inline void for_values(Span slices, int64_t step, F&& f) {
  for (int64_t first = slices.begin / SLICES_AT_ONCE * SLICES_AT_ONCE; first < slices.end; first += SLICES_AT_ONCE) {
    const int64_t begin = std::max(first, slices.begin), end = std::min(first + SLICES_AT_ONCE, slices.end);
    int64_t offset = 0;
    for (int64_t lane = 0; lane < LANES; lane += PAIR<T>, offset += step)
      for (int64_t slice = begin; slice < end; slice++) f(slice, lane, offset);
  }
}

// out[M][N vectors from `feature` on] = probabilities[M] . values; `step` is the distance between pairs of tokens.
// `factors`: of the rows' results; null for a cache without scales.
template <class Format, int M, int N, class T = typename Format::Number, class Stored = typename Format::Stored>
__attribute__((noinline)) void multiply_values(const T* probabilities, const Stored* const* values,
                                               const Stored* const* later, Span slices, int64_t step, int64_t feature,
                                               const float* factors, float* out) {
  Totals<T, M, N> totals;
  for_values<T>(slices, step, [&](int64_t slice, int64_t lane, int64_t offset) __attribute__((always_inline)) {
    const Stored* from = values[slice] + offset + feature * PAIR<T>;
    const Stored* fetch = later[slice] + offset + feature * PAIR<T>;
    Register<T> b[N * PARTS];
#pragma GCC unroll 16
    for (int i = 0; i < N * PARTS; i++) b[i] = Format::decode(from + i * WIDTH * PAIR<T>);
    for (int n = 0; n < N; n++) __builtin_prefetch(fetch + n * LANES * PAIR<T>);
    totals.add(probabilities + slice * LANES + lane, CHUNK_LANES, b);
  });
  if constexpr (Format::HAS_SCALES) totals.write(out + feature, RESULT_SIZE, factors);
  else totals.write(out + feature, RESULT_SIZE);
}

// The same for one row and the features after the last full vector.
template <class Format, class T = typename Format::Number, class Stored = typename Format::Stored>
__attribute__((noinline)) void multiply_rest(const T* probabilities, const Stored* const* values, Span slices,
                                             int64_t step, int64_t feature, const float* factors, float* out) {
  Totals<T, 1, 1> totals;
  for_values<T>(slices, step, [&](int64_t slice, int64_t lane, int64_t offset) {
    Stored rest[LANES * PAIR<T>] = {};
    std::memcpy((void*)rest, values[slice] + offset + feature * PAIR<T>,
                size_t(step - feature * PAIR<T>) * sizeof(Stored));
    Register<T> b[PARTS];
    for (int i = 0; i < PARTS; i++) b[i] = Format::decode(rest + i * WIDTH * PAIR<T>);
    totals.add(probabilities + slice * LANES + lane, CHUNK_LANES, b);
  });
  if constexpr (Format::HAS_SCALES) totals.write(out + feature, RESULT_SIZE, factors);
  else totals.write(out + feature, RESULT_SIZE);
}

// ---- softmax

inline Floats exp2_of(Floats x, float) { return exp2(x); }
template <class T>  // Bf16, or a number that is multiplied with codes
inline Floats exp2_of(Floats x, T) {
#ifdef __AVX512DQ__
  // 2^(x - floor(x)) * 2^floor(x), with a relative error of 3e-6, far below that of rounding to bfloat16.
  Floats rest = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
  Floats p = splat(1.353416803e-2f);
  p = p * rest + 5.201146141e-2f;
  p = p * rest + 2.414427556e-1f;
  p = p * rest + 6.930038350e-1f;
  p = p * rest + 1.000002593f;
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  return exp2(x);
#endif
}

inline Floats hide(Floats scores, Span visible) {
  const Floats lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, hidden = splat(-INFINITY);
  if (visible.begin <= 0 && visible.end >= LANES) return scores;
  Floats behind_begin = select_below(lanes, splat(float(visible.begin)), hidden, scores);
  return select_below(lanes, splat(float(visible.end)), behind_begin, hidden);
}

// The scales of a chunk: each slice has 16 for its keys and 16 for its values.
struct SliceScales {
  const Bf16* keys[CHUNK_SLICES];
  const Bf16* values[CHUNK_SLICES];
};

// Compute the probabilities of a row's scores relative to the highest score, which is returned, and 16 partial sums of
// them. visible(slice) is the span of lanes that the row sees; other probabilities are 0. The scores are overwritten.
// If the cache has scales, the scores are multiplied by those of the keys first, and the probabilities by those of the
// values in the end; `factor` becomes that of the results.
template <class Format, class Visible, class T = typename Format::Number>
inline float softmax(Span slices, Visible&& visible, float scale, const SliceScales& scales, float* scores,
                     T* probabilities, float* sums, float* factor) {
  // Four independent chains, so that instructions do not wait for each other; slice i belongs to chain i % 4.
  const int64_t begin = slices.begin / 4 * 4, end = round_up(slices.end, 4);
  Floats maxima[4] = {splat(NO_SCORE), splat(NO_SCORE), splat(NO_SCORE), splat(NO_SCORE)}, totals[4] = {};
  for (int64_t first = begin; first < end; first += 4)
    for (int i = 0; i < 4; i++) {
      float* at = scores + (first + i) * LANES;
      Floats x = load(at);
      if constexpr (Format::HAS_SCALES) x = x * load(scales.keys[first + i]);
      x = hide(x, visible(first + i));
      store(at, x);
      maxima[i] = max(x, maxima[i]);
    }
  const float max_score = max_lane(max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3]))) * scale;
  for (int64_t first = begin; first < end; first += 4)
    for (int i = 0; i < 4; i++) {
      Floats p = exp2_of(load(scores + (first + i) * LANES) * scale - max_score, T{});
      totals[i] += p;
      if constexpr (Format::HAS_SCALES) {
        // a value that the row does not see may have any scale, also NaN
        store(scores + (first + i) * LANES,
              select_below(Floats{}, p, p * load(scales.values[first + i]), Floats{}));
      } else {
        store(probabilities + (first + i) * LANES, p);
      }
    }
  if constexpr (Format::HAS_SCALES)
    *factor = convert_numbers<Format>(scores + begin * LANES, (end - begin) * LANES, probabilities + begin * LANES);
  store(sums, (totals[0] + totals[1]) + (totals[2] + totals[3]));
  return max_score;
}

// ---- results

// Add the result of a chunk, relative to its highest score, to that of the chunks before it.
__attribute__((noinline)) void merge(float* total, float* total_max_score, const float* part, float part_max_score,
                                     int64_t size) {
  const bool higher = part_max_score > *total_max_score;
  Floats less = exp2(splat(higher ? *total_max_score - part_max_score : part_max_score - *total_max_score));
  Floats keep = higher ? less : splat(1.0f), take = higher ? splat(1.0f) : less;
  for (int64_t i = 0; i < size; i += LANES) store(total + i, load(total + i) * keep + load(part + i) * take);
  if (higher) *total_max_score = part_max_score;
}

// Divide the features by the sum of the probabilities. `sink` is the probability of the sink, relative to the highest
// score like the sums.
template <class T>
__attribute__((noinline)) void finish(const float* total, const float* sums, float sink, int64_t size, T* out) {
  const float scale = 1.0f / (sum(load(sums)) + sink);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(out + i, load(total + i) * scale);
  for (; i < size; i++) out[i] = from_float<T>(total[i] * scale);
}

}  // namespace
}  // namespace eagleray

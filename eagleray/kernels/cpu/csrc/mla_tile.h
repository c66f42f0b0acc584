// The products and the softmax of a tile of latent attention: some rows by the tokens of a chunk.
//
// A row is the query of one token and head, and a lane of the vectors here. The cached vectors of the tokens are read
// where they are: scores are the products of cached vectors with the rows' queries, which lie side by side. For the
// weighted sums, some features of the latents at a time are copied, so that a word holds a pair of tokens.
#pragma once

#include "attention_division.h"

namespace eagleray {
namespace {

static_assert(TILE == 3 * LANES, "see `multiply_queries` for the numbers of vectors");

constexpr int64_t VALUE_FEATURES = VECTORS * LANES;  // of a copy

// Cached vectors that are multiplied with N vectors of rows at a time. Their sums fit into the vector registers, and
// their addresses into the others.
template <int N>
constexpr int TOKENS = PARTS > 1 ? MAX_ROWS : N == 1 ? 10 : 8;

constexpr int64_t MOST_TOKENS = TOKENS<1>;

// scores [M tokens, TILE]: N vectors of rows. queries: [size / PAIR][TILE][PAIR]. Memory at `later` is prefetched.
template <class T, int M, int N>
__attribute__((noinline)) void score_tokens(const T* const* tokens, const T* const* later, int64_t size,
                                            const T* queries, float* scores) {
  Totals<T, M, N> totals;
  const T* from[M];
  for (int m = 0; m < M; m++) from[m] = tokens[m];
  constexpr int64_t LINE = CACHE_LINE / int64_t(sizeof(T));
  for (int64_t begin = 0; begin < size; begin += LINE) {
    for (int m = 0; m < M; m++) __builtin_prefetch(later[m] + begin);
    for (int64_t i = begin; i < std::min(begin + LINE, size); i += PAIR<T>, queries += TILE * PAIR<T>) {
      Register<T> b[N * PARTS];
#pragma GCC unroll 16
      for (int n = 0; n < N * PARTS; n++) b[n] = read<Register<T>>(queries + n * WIDTH * PAIR<T>);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        Register<T> pair = splat_to(Register<T>{}, from[m] + i);
#pragma GCC unroll 16
        for (int n = 0; n < N * PARTS; n++) totals.of[m][n] = add_products(totals.of[m][n], pair, b[n]);
      }
    }
  }
  totals.write(scores, TILE);
}

// scores [round_up(num_tokens, MOST_TOKENS), TILE], N vectors of them from `vector` on; those behind the last token
// repeat it.
template <class T, int N>
void score_vectors(const T* const* tokens, int64_t num_tokens, int64_t size, const T* queries, int64_t vector,
                   float* scores) {
  constexpr int M = TOKENS<N>;
  for (int64_t first = 0; first < num_tokens; first += M) {
    const T *some[M], *later[M];
    for (int64_t m = 0; m < M; m++) {
      some[m] = tokens[std::min(first + m, num_tokens - 1)];
      later[m] = tokens[std::min(first + M + m, num_tokens - 1)];
    }
    score_tokens<T, M, N>(some, later, size, queries + vector * LANES * PAIR<T>,
                          scores + first * TILE + vector * LANES);
  }
}

template <class T>
void multiply_queries(const T* const* tokens, int64_t num_tokens, int64_t size, const T* queries, int64_t num_vectors,
                      float* scores) {
  if constexpr (PARTS > 1) {
    for (int64_t i = 0; i < num_vectors; i++) score_vectors<T, 1>(tokens, num_tokens, size, queries, i, scores);
  } else {
    if (num_vectors == 1) score_vectors<T, 1>(tokens, num_tokens, size, queries, 0, scores);
    if (num_vectors == 2) score_vectors<T, 2>(tokens, num_tokens, size, queries, 0, scores);
    if (num_vectors == 3) score_vectors<T, 3>(tokens, num_tokens, size, queries, 0, scores);
  }
}

// ---- softmax

// The numbers of two consecutive tokens, side by side in a pair; float has pairs of one, so they are two pairs.
inline void store_tokens(float* to, Floats first, Floats second) {
  store(to, first);
  store(to + TILE, second);
}
inline Words words_of(const Bf16* halves) {
  Halves bits;
  std::memcpy(&bits, halves, sizeof bits);
  return __builtin_convertvector(bits, Words);
}
inline void store_tokens(Bf16* to, Floats first, Floats second) {
  Bf16 halves[2][LANES];
  store(halves[0], first);
  store(halves[1], second);
  Words words = words_of(halves[0]) | words_of(halves[1]) << 16;
  std::memcpy((void*)to, &words, sizeof words);
}

struct RowSums {
  Floats highest, total;  // score, and sum of the probabilities
};

// Compute the probabilities [tokens / PAIR][TILE][PAIR] of 16 rows relative to each row's highest score. A row sees the
// tokens before its lane of `ends`; all see those before `whole`. `num_tokens` is rounded up to a multiple of 4.
template <class T>
inline RowSums softmax_of_rows(const float* scores, int64_t num_tokens, int64_t whole, Floats ends, float scale,
                               T* probabilities) {
  auto score = [&](int64_t token) {
    Floats x = load(scores + token * TILE);
    return token < whole ? x : select_below(splat(float(token)), ends, x, splat(-INFINITY));
  };
  // Four independent chains, so that instructions do not wait for each other; token i belongs to chain i % 4.
  Floats maxima[4] = {splat(NO_SCORE), splat(NO_SCORE), splat(NO_SCORE), splat(NO_SCORE)}, totals[4] = {};
  for (int64_t first = 0; first < num_tokens; first += 4)
    for (int i = 0; i < 4; i++) maxima[i] = max(score(first + i), maxima[i]);
  const Floats highest = max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3])) * scale;
  for (int64_t first = 0; first < num_tokens; first += 4) {
    Floats p[4];
    for (int i = 0; i < 4; i++) totals[i] += p[i] = exp2_of(score(first + i) * scale - highest, T{});
    store_tokens(probabilities + first * TILE, p[0], p[1]);
    store_tokens(probabilities + (first + 2) * TILE, p[2], p[3]);
  }
  return {highest, (totals[0] + totals[1]) + (totals[2] + totals[3])};
}

// ---- weighted sums

inline void copy_features(const float* first, const float*, float* to) {
  std::memcpy(to, first, size_t(VALUE_FEATURES) * sizeof(float));
}
inline void copy_features(const Bf16* first, const Bf16* second, Bf16* to) {
  for (int64_t i = 0; i < VALUE_FEATURES; i += LANES) {
    Words words = words_of(first + i) | words_of(second + i) << 16;
    std::memcpy((void*)(to + i * PAIR<Bf16>), &words, sizeof words);
  }
}

// values [pairs][VALUE_FEATURES][PAIR]: `count` features of the tokens from `feature` on. Zeros follow the features and
// the tokens.
template <class T>
void copy_values(const T* const* tokens, int64_t num_tokens, int64_t feature, int64_t count, T* values) {
  static const T none[VALUE_FEATURES] = {};
  for (int64_t token = 0; token < num_tokens; token += PAIR<T>, values += VALUE_FEATURES * PAIR<T>) {
    const T* from[] = {tokens[token] + feature, token + 1 < num_tokens ? tokens[token + 1] + feature : none};
    T padded[2][VALUE_FEATURES] = {};
    if (count < VALUE_FEATURES)
      for (int i = 0; i < PAIR<T>; i++) {
        std::memcpy((void*)padded[i], from[i], size_t(count) * sizeof(T));
        from[i] = padded[i];
      }
    copy_features(from[0], from[1], values);
  }
}

// parts [M rows, step] = probabilities . values, for all features of the copy.
template <class T, int M>
__attribute__((noinline)) void sum_values(const T* probabilities, const T* values, int64_t num_tokens, float* parts,
                                          int64_t step) {
  Totals<T, M, VECTORS> totals;
  for (int64_t token = 0; token < num_tokens; token += PAIR<T>) {
    Register<T> b[VECTORS * PARTS];
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS * PARTS; i++) b[i] = read<Register<T>>(values + i * WIDTH * PAIR<T>);
    totals.add(probabilities, PAIR<T>, b);
    probabilities += TILE * PAIR<T>, values += VALUE_FEATURES * PAIR<T>;
  }
  totals.write(parts, step);
}

}  // namespace
}  // namespace eagleray

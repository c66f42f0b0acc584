// Operations on rows of hidden states, [num_rows, size] floats of which row i begins at i * stride.
//
// The teams divide the rows.
#pragma once

#include "base.h"

namespace eagleray {

// out = x / sqrt(mean(x^2) + eps) * weight, rounded once. `out` may be `x`.
template <class T>
void normalize(const Team& team, const float* x, int64_t stride, int64_t num_rows, int64_t size, const float* weight,
               float eps, T* out, int64_t out_stride);

// The rows of the tokens first, first + 1, ... of the vocabulary: all of it, or a tensor-parallel share.
template <class T>
struct Table {
  const T* values;
  bool is_packed;  // as the weight of a product: that of the head, where the two are tied
  int64_t size;    // of a row
  int64_t first, num_own;
};

// out [num_rows, size]: the rows of the tokens, zeros for those that the table does not have.
template <class T>
void embed(const Team& team, const Table<T>& table, const int32_t* token_ids, int64_t num_rows, float* out);

// out += x
void add(const Team& team, const float* x, int64_t stride, int64_t num_rows, int64_t size, float* out,
         int64_t out_stride);

// out = x, rounded.
template <class T>
void round(const Team& team, const float* x, int64_t stride, int64_t num_rows, int64_t size, T* out,
           int64_t out_stride);

// ---- what is left of a row behind its last whole vector: fewer than 16 numbers

inline Floats load_some(const float* from, int64_t count) {  // the other lanes are 0
  Floats x{};
  std::memcpy(&x, from, size_t(count) * sizeof(float));
  return x;
}

template <class T>
inline void store_some(T* to, Floats x, int64_t count) {
  T lanes[LANES];
  store(lanes, x);
  std::memcpy(to, lanes, size_t(count) * sizeof(T));
}

// step(i, count) for each vector of a row: 16 numbers from i on, or the `count` that are left. 16 is a type of its own,
// so that whole vectors are loaded and stored without a look at the count.
template <class Step>
inline void for_vectors(int64_t size, Step&& step) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) step(i, std::integral_constant<int64_t, LANES>{});
  if (i < size) step(i, size - i);
}

}  // namespace eagleray

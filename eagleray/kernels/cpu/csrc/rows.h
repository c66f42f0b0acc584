// Operations on hidden states [num_rows, size] of floats, whose row i begins at i * stride. The shards divide the rows.
#pragma once

#include "base.h"

namespace eagleray {

// out = x / sqrt(mean(x^2) + eps) * weight, rounded to T once. `out` may be `x`.
template <class T>
void normalize(const Shard& shard, const float* x, int64_t stride, int64_t num_rows, int64_t size, const float* weight,
               float eps, T* out, int64_t out_stride);

// The rows of the tokens first, first + 1, ... of the vocabulary: all of it, or a tensor-parallel shard.
template <class T>
struct EmbeddingTable {
  const T* values;
  bool is_packed;  // as the weight of a product: that of the head, where the two are tied
  const CGrouping* grouping;  // of a packed weight of few bits; null: T
  int64_t size;               // of a row
  int64_t first, num_own;
};

// out [num_rows, size]: the rows of the tokens, zeros for tokens that the table does not have.
template <class T>
void embed(const Shard& shard, const EmbeddingTable<T>& table, const int32_t* token_ids, int64_t num_rows, float* out);

// out += x
void add(const Shard& shard, const float* x, int64_t stride, int64_t num_rows, int64_t size, float* out,
         int64_t out_stride);

// out = x, rounded to T.
template <class T>
void round(const Shard& shard, const float* x, int64_t stride, int64_t num_rows, int64_t size, T* out,
           int64_t out_stride);

// ---- rows whose size is no multiple of 16

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

// Call visit(i, count) for each vector of a row: 16 numbers from i on, finally the remaining `count`. 16 is passed as a
// type, so that whole vectors are loaded and stored without a test of the count.
template <class Visit>
inline void for_vectors(int64_t size, Visit&& visit) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) visit(i, std::integral_constant<int64_t, LANES>{});
  if (i < size) visit(i, size - i);
}

}  // namespace eagleray

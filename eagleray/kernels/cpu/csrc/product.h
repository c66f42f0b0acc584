// The product of rows with a weight, y = x W^T. For one row its speed is that of memory, for many that of the core.
//
// A weight is packed once, into one layout for every number of rows: panels of 32 outputs, and within a panel pair by
// pair along k, [ceil(n / 32)][ceil(k / PAIR)][32][PAIR], with zeros where n or k ends. A thread reads its panels
// sequentially, once for dozens of rows.
//
// Each sum runs over k in order, pair by pair, whatever the number of rows, products or threads, so its bits depend
// only on its own row and weight.
#pragma once

#include "base.h"

namespace eagleray {

constexpr int PANEL = PANEL_ROWS;  // outputs of a panel

template <class T>
struct AdaptedRows;

// The number of elements of a packed weight of n outputs. Its address should be a multiple of 64, best in huge pages.
template <class T>
int64_t packed_size(int64_t n, int64_t k);

// Pack the shard's panels of weight [n, k], whose rows are `stride` elements apart.
template <class T>
void pack(const Shard& shard, const T* weight, int64_t stride, int64_t n, int64_t k, T* out);

// Pack gate and up [inner, k] into panels of 16 rows of gate and the corresponding 16 rows of up, for gated epilogues.
// `out` has packed_size(2 * round_up(inner, 16), k) elements.
template <class T>
void pack_gate_up(const Shard& shard, const T* gate, const T* up, int64_t stride, int64_t inner, int64_t k, T* out);

// Copy a row of a weight that `pack` packed to out [k]. One thread calls it.
template <class T, class Out>
void unpack_row(const T* packed, int64_t row, int64_t k, Out* out);

inline bool is_gated(int64_t epilogue) { return epilogue == EPILOGUE_SILU || epilogue == EPILOGUE_CLAMPED_SWIGLU; }

// The result of a gated epilogue.
inline Floats apply_gate(int64_t epilogue, const CClampedSwiglu& swiglu, Floats gate, Floats up) {
  if (epilogue == EPILOGUE_SILU) return silu(gate) * up;
  const Floats limit = splat(swiglu.limit), alpha = splat(swiglu.alpha);
  gate = gate > limit ? limit : gate;  // not `min`, because NaN must stay NaN
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.0f + exp(-max(alpha * gate, splat(-87.0f)))) * (up + 1.0f);
}

// `CProduct` with typed pointers.
template <class T>
struct Product {
  const T* x;
  int64_t x_stride;
  const int32_t* x_rows;
  int64_t num_rows;
  const T* weight;
  int64_t n, k;
  const float* bias;
  int64_t epilogue;
  CClampedSwiglu swiglu;
  void* y;
  int64_t y_stride;
  const CGrouping* grouping = nullptr;       // of a weight of few bits, see grouped.h; null: the weight is T, packed
  const AdaptedRows<T>* adapters = nullptr;  // are added to the results before the bias; null: none
};

// Compute the shard's part of a product. Shards do not wait for each other.
template <class T>
void multiply(const Shard& shard, const Product<T>& product);

// Compute the shard's part of several products, such as those of experts. The shards divide the sum of their work
// equally. A product without rows costs nothing.
template <class T>
void multiply_all(const Shard& shard, const Product<T>* products, int64_t count);

}  // namespace eagleray

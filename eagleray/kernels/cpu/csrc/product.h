// The product of rows with a weight, y = x W^T, that is as fast for one row as memory is and for many as the core is.
//
// A weight is packed once, into one layout for every number of rows: panels of 32 outputs, and in a panel pair by pair
// along k, [ceil(n / 32)][ceil(k / PAIR)][32][PAIR], with zeros where n or k end. A thread reads its panels front to
// back, once for dozens of rows.
//
// Each sum runs over k in order, pair by pair, whatever the number of rows, products or threads: its bits depend on its
// own row and weight alone.
#pragma once

#include "base.h"

namespace eagleray {

constexpr int PANEL = 32;  // outputs of a panel

// The number of elements of a packed weight of n outputs. Keep them where a multiple of 64 bytes begins, best in huge
// pages.
template <class T>
int64_t packed_size(int64_t n, int64_t k);

// weight: [n, k], rows `stride` elements apart.
template <class T>
void pack(const Team& team, const T* weight, int64_t stride, int64_t n, int64_t k, T* out);

// gate, up: [inner, k] -> panels of 16 rows of gate and the 16 rows of up that belong to them, as gated endings take
// them. `out` has packed_size(2 * round_up(inner, 16), k) elements.
template <class T>
void pack_gate_up(const Team& team, const T* gate, const T* up, int64_t stride, int64_t inner, int64_t k, T* out);

// A row of the weight that `pack` packed: [k]. One thread does it.
template <class T, class Out>
void unpack_row(const T* packed, int64_t row, int64_t k, Out* out);

inline bool is_gated(int64_t ending) { return ending == ENDING_SILU || ending == ENDING_CLAMPED_SWIGLU; }

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
  int64_t ending;
  CClampedSwiglu swiglu;
  void* y;
  int64_t y_stride;
};

// All threads of the team do their part. None waits for the others, neither before nor after.
template <class T>
void multiply(const Team& team, const Product<T>& product);

// Many products at once, as of experts: their work in one line, cut into equal parts. One without rows costs nothing.
template <class T>
void multiply_all(const Team& team, const Product<T>* products, int64_t count);

}  // namespace eagleray

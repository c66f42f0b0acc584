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

enum class Ending : int32_t {
  store,    // float y = result
  add,      // float y += result
  silu,     // T y[row, j] = silu(gate j) * up j, for what `pack_gate_up` packed
  clamped,  // the same for T y[row, j] = gate * sigmoid(alpha * gate) * (up + 1), with gate j at most `limit`, and up j
            // between -limit and limit
};

inline bool is_gated(Ending ending) { return ending == Ending::silu || ending == Ending::clamped; }

// Of `Ending::clamped`. `abi.py` mirrors it.
struct Clamp {
  float alpha, limit;
};

template <class T>
struct Product {
  const T* x;             // [*, k]; if k is odd, a zero follows each row of Bf16
  int64_t x_stride;       // elements from row to row
  const int32_t* x_rows;  // row i of the product is row x_rows[i] of x; null: row i
  int64_t num_rows;
  const T* weight;        // packed
  int64_t n, k;           // n outputs; if gated 2 * inner, whatever `inner` was padded to
  const float* bias;      // [n], if gated that of gate and then that of up; null: none
  Ending ending;
  Clamp clamp;
  void* y;                // [num_rows, n] float, or if gated [num_rows, inner] T
  int64_t y_stride;       // elements from row to row
};

// All threads of the team do their part. None waits for the others, neither before nor after.
template <class T>
void multiply(const Team& team, const Product<T>& product);

// Many products at once, as of experts: their work in one line, cut into equal parts. One without rows costs nothing.
template <class T>
void multiply_all(const Team& team, const Product<T>* products, int64_t count);

}  // namespace eagleray

// A tile: a few rows times a panel of the weight, all of whose sums stay in registers while k runs.
//
// Each sum is computed by the same operations in the same order, however many rows the tile has.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "product.h"

namespace eagleray {

// ---- registers. Unlike `Floats` these are exactly one register: a tile must be kept in them.

#if defined(__AVX512F__)
constexpr int WIDTH = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int WIDTH = 8, REGISTERS = 16;
#elif defined(__x86_64__)
constexpr int WIDTH = 4, REGISTERS = 16;
#else
constexpr int WIDTH = 4, REGISTERS = 32;
#endif

typedef float Sums __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));

template <class T>
using Register = std::conditional_t<std::is_same_v<T, float>, Sums, Bits>;  // of pairs

template <class Vector, class From>
inline Vector read(const From* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Sums splat_to(Sums, const float* pair) { return *pair - Sums{}; }  // x - 0 is x, whatever x is; x + 0 is not
inline Bits splat_to(Bits, const Bf16* pair) { return Bits{} + read<uint32_t>(pair); }

inline Sums add_products(Sums total, Sums a, Sums b) { return total + a * b; }
inline Sums add_products(Sums total, Bits a, Bits b) {
#ifdef __AVX512BF16__
  return (Sums)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
  Bits high = Bits{} + 0xffff0000u;
  return total + (Sums)(a & high) * (Sums)(b & high) + (Sums)(a << 16) * (Sums)(b << 16);
#endif
}

// ---- sizes

template <class T>
constexpr int TILE_ROWS = REGISTERS == 32 ? 12 : std::is_same_v<T, float> ? 6 : 4;

// Registers of a row of the tile: 2, or as many as few rows leave room for. If that is not the panel, the tile is
// computed in several passes over it.
template <class T>
constexpr int columns_of(int rows) {
  int columns = 2;
  while (columns * WIDTH < PANEL && 2 * columns * rows <= 2 * TILE_ROWS<T>) columns *= 2;
  return columns;
}

// What to fetch meanwhile: `pace` bytes, at most 128, with each pair of k.
struct Ahead {
  const char* from;
  int64_t pace;
};

inline void fetch(Ahead& ahead) {
  __builtin_prefetch(ahead.from);
  __builtin_prefetch(ahead.from + 64);
  ahead.from += ahead.pace;
}

// ---- the rows of a tile

// Where they are. Few rows are read so: what they wait for is the weight.
template <class T, int ROWS>
struct Apart {
  const T* rows[ROWS];

  Apart(const T* const* x, int64_t k) {
    for (int row = 0; row < ROWS; row++) rows[row] = x[row] + k;
  }
  const T* at(int row, int64_t pair) const { return rows[row] + pair * PAIR<T>; }
};

// Pair by pair along k, [pairs][arranged(rows)][PAIR], in the order in which they are read: one address for all, and no
// two that drive each other out of the first-level cache.
constexpr int arranged(int64_t rows) { return int(round_up(rows, 4)); }

template <class T, int ROWS>
struct Arranged {
  const T* rows;

  Arranged(const T* const* x, int64_t k) : rows(*x + k * arranged(ROWS)) {}
  const T* at(int row, int64_t pair) const { return rows + (pair * arranged(ROWS) + row) * PAIR<T>; }
};

typedef uint32_t Four __attribute__((vector_size(16)));

// x: rows of `pairs` pairs. Four rows and four pairs are exchanged at a time.
template <class T>
inline void arrange(const T* const* x, int64_t rows, int64_t pairs, T* to) {
  int64_t stride = arranged(rows);
  for (int64_t first = 0; first < stride; first += 4) {
    const T* from[4];
    for (int row = 0; row < 4; row++) from[row] = x[std::min(first + row, rows - 1)];
    T* at = to + first * PAIR<T>;
    int64_t pair = 0;
    for (; pair + 4 <= pairs; pair += 4) {
      Four a = read<Four>(from[0] + pair * PAIR<T>), b = read<Four>(from[1] + pair * PAIR<T>);
      Four c = read<Four>(from[2] + pair * PAIR<T>), d = read<Four>(from[3] + pair * PAIR<T>);
      Four ab = __builtin_shuffle(a, b, Four{0, 4, 1, 5}), ab_next = __builtin_shuffle(a, b, Four{2, 6, 3, 7});
      Four cd = __builtin_shuffle(c, d, Four{0, 4, 1, 5}), cd_next = __builtin_shuffle(c, d, Four{2, 6, 3, 7});
      Four columns[] = {__builtin_shuffle(ab, cd, Four{0, 1, 4, 5}), __builtin_shuffle(ab, cd, Four{2, 3, 6, 7}),
                        __builtin_shuffle(ab_next, cd_next, Four{0, 1, 4, 5}),
                        __builtin_shuffle(ab_next, cd_next, Four{2, 3, 6, 7})};
      for (auto& column : columns) {
        std::memcpy(at, &column, sizeof column);
        at += stride * PAIR<T>;
      }
    }
    for (; pair < pairs; pair++, at += stride * PAIR<T>)
      for (int row = 0; row < 4; row++) std::memcpy(at + row * PAIR<T>, from[row] + pair * PAIR<T>, sizeof(uint32_t));
  }
}

// ---- tiles

// sums: [ROWS, PANEL], over what came before in k if `resume`. x: the rows, to be read from element `k` on, or one
// pointer to them if they are arranged.
template <class T, int ROWS, template <class, int> class X>
void multiply_tile(const T* const* x, int64_t k, const T* weight, int64_t pairs, float* sums, bool resume,
                   Ahead ahead) {
  constexpr int COLUMNS = columns_of<T>(ROWS);
  const X<T, ROWS> rows(x, k);

  for (int output = 0; output < PANEL; output += COLUMNS * WIDTH) {
    Sums total[ROWS][COLUMNS];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
      for (int column = 0; column < COLUMNS; column++)
        total[row][column] = resume ? read<Sums>(sums + row * PANEL + output + column * WIDTH) : Sums{};

    const T* from = weight + output * PAIR<T>;
    for (int64_t pair = 0; pair < pairs; pair++, from += PANEL * PAIR<T>) {
      if (output == 0) fetch(ahead);
      Register<T> weights[COLUMNS];
#pragma GCC unroll 16
      for (int column = 0; column < COLUMNS; column++)
        weights[column] = read<Register<T>>(from + column * WIDTH * PAIR<T>);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++) {
        Register<T> values = splat_to(Register<T>{}, rows.at(row, pair));
#pragma GCC unroll 16
        for (int column = 0; column < COLUMNS; column++)
          total[row][column] = add_products(total[row][column], weights[column], values);
      }
    }

#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
      for (int column = 0; column < COLUMNS; column++)
        std::memcpy(sums + row * PANEL + output + column * WIDTH, &total[row][column], sizeof(Sums));
  }
}

template <class T>
using Tile = void (*)(const T* const*, int64_t, const T*, int64_t, float*, bool, Ahead);

template <class T, template <class, int> class X, int... ROWS>
constexpr std::array<Tile<T>, sizeof...(ROWS)> list_tiles(std::integer_sequence<int, ROWS...>) {
  return {multiply_tile<T, ROWS + 1, X>...};
}

// rows: 1 to TILE_ROWS
template <class T>
inline Tile<T> choose_tile(int64_t rows, bool are_arranged) {
  using Sizes = std::make_integer_sequence<int, TILE_ROWS<T>>;
  static constexpr auto apart = list_tiles<T, Apart>(Sizes{}), arranged = list_tiles<T, Arranged>(Sizes{});
  return (are_arranged ? arranged : apart)[rows - 1];
}

}  // namespace eagleray

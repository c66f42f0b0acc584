// A tile: a few rows times a panel of the weight, all of whose sums stay in registers while k runs.
//
// Each sum is computed by the same operations in the same order, however many rows the tile has.
#pragma once

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

// ---- tiles

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

// sums: [ROWS, PANEL], over what came before in k if `resume`. x: rows, to be read from element `k` on.
template <class T, int ROWS>
void multiply_tile(const T* const* x, int64_t k, const T* weight, int64_t pairs, float* sums, bool resume,
                   Ahead ahead) {
  constexpr int COLUMNS = columns_of<T>(ROWS);
  const T* end[ROWS];
  for (int row = 0; row < ROWS; row++) end[row] = x[row] + k + pairs * PAIR<T>;

  for (int output = 0; output < PANEL; output += COLUMNS * WIDTH) {
    Sums total[ROWS][COLUMNS];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
      for (int column = 0; column < COLUMNS; column++)
        total[row][column] = resume ? read<Sums>(sums + row * PANEL + output + column * WIDTH) : Sums{};

    const T* from = weight + output * PAIR<T>;
    for (int64_t pair = -pairs; pair < 0; pair++, from += PANEL * PAIR<T>) {
      if (output == 0) fetch(ahead);
      Register<T> weights[COLUMNS];
#pragma GCC unroll 16
      for (int column = 0; column < COLUMNS; column++)
        weights[column] = read<Register<T>>(from + column * WIDTH * PAIR<T>);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++) {
        Register<T> values = splat_to(Register<T>{}, end[row] + pair * PAIR<T>);
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

template <class T, int... ROWS>
constexpr std::array<Tile<T>, sizeof...(ROWS)> list_tiles(std::integer_sequence<int, ROWS...>) {
  return {multiply_tile<T, ROWS + 1>...};
}

// rows: 1 to TILE_ROWS
template <class T>
inline Tile<T> choose_tile(int64_t rows) {
  static constexpr auto tiles = list_tiles<T>(std::make_integer_sequence<int, TILE_ROWS<T>>{});
  return tiles[rows - 1];
}

}  // namespace eagleray

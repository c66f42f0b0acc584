// Sums of blocks by products of pairs of integers of 16 bits, for processors without VNNI, see integer_tile.h. Two inputs
// of an output lie side by side. Codes are widened in registers by each tile anew, which takes a fraction of the time of
// the products.
#pragma once

#include "integer_layout.h"

#if defined(HAS_INTEGER_PRODUCTS) && !defined(HAS_BYTE_PRODUCTS)

namespace eagleray {

constexpr int INPUTS_TOGETHER = 2;  // side by side

// The number of registers, WIDTH outputs each, that are multiplied together.
constexpr int registers_together(int rows) { return columns_of<Int16>(rows); }

constexpr int64_t CODE_LINE = PANEL * INPUTS_TOGETHER;  // bytes of codes that are multiplied together
static_assert(CODE_LINE == CACHE_LINE);

// Add the products of a register of weights with a pair of inputs of each row.
template <int ROWS>
inline void add_pairs(Shorts weights, const Int16* inputs, WholeSums (&sums)[ROWS]) {
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; row++)
    sums[row] = add_products(sums[row], weights, splat_to(Shorts{}, inputs + row * INTEGER_STEP));
}

// Compute the sums of `count` inputs from input `begin` of a block on. codes: of the block, from the first output on;
// row_sums: of the rows' integers; ahead: the distance of what is prefetched.
template <int BITS, int ROWS, int COLUMNS>
inline void sum_inputs(const uint8_t* codes, const IntegerRows& rows, int64_t at, int64_t begin, int64_t count,
                       const int32_t* row_sums, int64_t ahead, WholeSums (&to)[COLUMNS][ROWS]) {
  constexpr int64_t INPUTS = INPUTS_TOGETHER * 8 / BITS, BYTES = WIDTH * INPUTS_TOGETHER;  // of a line, of a register
  WholeSums sums[COLUMNS][ROWS];  // unlike `to`, these stay in registers
#pragma GCC unroll 16
  for (int column = 0; column < COLUMNS; column++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
      sums[column][row] = WholeSums{} - (BITS == 4 ? ZERO_4 * row_sums[row] : 0);
  codes += begin / INPUTS * CODE_LINE;
  const int64_t together = std::min(count, INTEGER_STEP);
  for (int64_t first = begin; first < begin + count; first += together) {
    const Int16* inputs = rows.whole(at, first / INTEGER_STEP * INTEGER_STEP) + first % INTEGER_STEP;
    for (int64_t input = 0; input < together; input += INPUTS, codes += CODE_LINE) {
      __builtin_prefetch(codes + ahead);
#pragma GCC unroll 16
      for (int column = 0; column < COLUMNS; column++) {
        const uint8_t* from = codes + column * BYTES;
        if (BITS == 8) {
          add_pairs(widen(reinterpret_cast<const int8_t*>(from)), inputs + input, sums[column]);
        } else {
          const Shorts both = widen(from);
          add_pairs(both & 15, inputs + input, sums[column]);
          add_pairs(both >> 4, inputs + input + INPUTS_TOGETHER, sums[column]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int column = 0; column < COLUMNS; column++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) to[column][row] = sums[column][row];
}

// Multiples of scales for a register of sums. GCC converts parts of a register apart.
inline WholeSums widen_multiples(const int8_t* from) {
#if defined(__AVX512F__)
  return (WholeSums)_mm512_cvtepi8_epi32(read<__m128i>(from));
#elif defined(__AVX2__)
  return (WholeSums)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  typedef int8_t Multiples __attribute__((vector_size(WIDTH)));
  return __builtin_convertvector(read<Multiples>(from), WholeSums);
#endif
}

// Compute the sums of block `at` of the rows, for the outputs of COLUMNS registers from `first` on. ahead: the distance of
// what is prefetched.
template <int BITS, int ROWS, int COLUMNS>
inline void sum_block(const IntegerLayout& layout, const uint8_t* block, int first, const IntegerRows& rows, int64_t at,
                      int64_t ahead, WholeSums (&sums)[COLUMNS][ROWS]) {
  auto sum = sum_inputs<BITS, ROWS, COLUMNS>;
  const uint8_t* codes = block + first * WIDTH * INPUTS_TOGETHER;
  if (BITS == 8 || !layout.has_multiples)
    return sum(codes, rows, at, 0, rows.block, rows.block_sums(at), ahead, sums);
#pragma GCC unroll 16
  for (int column = 0; column < COLUMNS; column++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) sums[column][row] = WholeSums{};
  for (int64_t group = 0; group < rows.groups; group++) {
    WholeSums of_group[COLUMNS][ROWS];
    sum(codes, rows, at, group * INTEGER_GROUP, INTEGER_GROUP, rows.group_sums(at, group), ahead, of_group);
#pragma GCC unroll 16
    for (int column = 0; column < COLUMNS; column++) {
      const WholeSums multiples = widen_multiples(layout.multiples(block, group, (first + column) * WIDTH));
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++) sums[column][row] += of_group[column][row] * multiples;
    }
  }
}

}  // namespace eagleray

#endif

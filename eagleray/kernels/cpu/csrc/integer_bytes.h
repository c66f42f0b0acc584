// Sums of blocks by instructions that multiply integers of 8 bits (VNNI), see integer_tile.h. Four inputs of an output lie
// side by side, so a vector of codes is multiplied with four upper or four lower bytes of a row.
#pragma once

#include "integer_layout.h"

#ifdef HAS_BYTE_PRODUCTS

namespace eagleray {

constexpr int INPUTS_TOGETHER = 4;  // side by side
constexpr int ZERO_8 = 128;         // what turns integers of 8 bits into unsigned ones

// The number of registers, 16 outputs each, that are multiplied together. Few rows have room for both halves of a panel.
constexpr int registers_together(int rows) { return rows <= 4 ? 2 : 1; }

inline __m512i join_halves(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

inline __m512i widen_multiples(const int8_t* from) { return _mm512_cvtepi8_epi32(read<__m128i>(from)); }

// Add the products of one vector of codes, of four inputs, with each row. inputs: the upper bytes of the first row's;
// IS_WIDE: see `IntegerRows.is_wide`.
template <int ROWS, bool IS_WIDE>
inline void add_four(__m512i codes, const int8_t* inputs, __m512i (&high)[ROWS], __m512i (&low)[ROWS]) {
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; row++) {
    const int8_t* from = inputs + row * INTEGER_STEP;
    high[row] = _mm512_dpbusd_epi32(high[row], codes, _mm512_set1_epi32(read<int32_t>(from)));
    if (IS_WIDE)
      low[row] = _mm512_dpbusd_epi32(low[row], codes, _mm512_set1_epi32(read<int32_t>(from + ROWS * INTEGER_STEP)));
  }
}

constexpr int64_t NEAR_CODES = 2048;  // distance in bytes of prefetching from the second-level cache into the first

// Compute the sums of a part of a block, inputs begin, ..., begin + count - 1, for HALVES halves of a panel; without wide
// integers, a 256th of them. codes: of the first half; row_sums: of the rows' integers; ahead: the distance of what is
// prefetched into the second-level cache.
template <int BITS, int ROWS, bool IS_WIDE, int HALVES>
inline void sum_part(const uint8_t* codes, const IntegerRows& rows, int64_t at, int64_t begin, int64_t count,
                     const int32_t* row_sums, int64_t ahead, __m512i (&sums)[HALVES][ROWS]) {
  constexpr int ZERO = BITS == 4 ? ZERO_4 : ZERO_8;
  constexpr int64_t INPUTS = 4 * 8 / BITS;  // of a vector
  __m512i high[HALVES][ROWS], low[HALVES][ROWS];
#pragma GCC unroll 2
  for (int half = 0; half < HALVES; half++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
      (IS_WIDE ? low : high)[half][row] = _mm512_set1_epi32(-ZERO * (IS_WIDE ? row_sums[row] : row_sums[row] / 256));
  if (IS_WIDE)
#pragma GCC unroll 2
    for (auto& of_half : high)
#pragma GCC unroll 16
      for (auto& sum : of_half) sum = _mm512_setzero_si512();
  codes += begin * PANEL * BITS / 8;
  const int8_t* inputs = rows.high(at, begin / INTEGER_STEP * INTEGER_STEP) + begin % INTEGER_STEP;
  const int64_t together = std::min(count, INTEGER_STEP);
  for (int64_t done = 0; done < count; done += together, inputs += rows.stride())
    for (int64_t input = 0; input < together; input += INPUTS, codes += 2 * CODE_VECTOR)
#pragma GCC unroll 2
      for (int half = 0; half < HALVES; half++) {
        const __m512i packed = _mm512_loadu_si512(codes + half * CODE_VECTOR);
        __builtin_prefetch(codes + half * CODE_VECTOR + ahead, 0, 2);
        __builtin_prefetch(codes + half * CODE_VECTOR + NEAR_CODES);
        auto add = add_four<ROWS, IS_WIDE>;
        if (BITS == 8) {
          add(_mm512_xor_si512(packed, _mm512_set1_epi8(int8_t(ZERO_8))), inputs + input, high[half], low[half]);
        } else {
          const __m512i nibble = _mm512_set1_epi8(15);
          add(_mm512_and_si512(packed, nibble), inputs + input, high[half], low[half]);
          add(_mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble), inputs + input + 4, high[half], low[half]);
        }
      }
#pragma GCC unroll 2
  for (int half = 0; half < HALVES; half++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
      sums[half][row] = IS_WIDE ? join_halves(high[half][row], low[half][row]) : high[half][row];
}

// Compute the sums of a block, or without wide integers a 256th of them, for HALVES halves of a panel from `first` on.
template <int BITS, int ROWS, bool IS_WIDE, int HALVES>
inline void sum_bytes(const IntegerLayout& layout, const uint8_t* block, int first, const IntegerRows& rows, int64_t at,
                      int64_t ahead, __m512i (&sums)[HALVES][ROWS]) {
  auto sum_inputs = sum_part<BITS, ROWS, IS_WIDE, HALVES>;
  const uint8_t* codes = block + first * CODE_VECTOR;
  if (BITS == 8 || !layout.has_multiples)
    return sum_inputs(codes, rows, at, 0, rows.block, rows.block_sums(at), ahead, sums);
#pragma GCC unroll 2
  for (int half = 0; half < HALVES; half++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) sums[half][row] = _mm512_setzero_si512();
  for (int64_t group = 0; group < rows.groups; group++) {
    __m512i of_group[HALVES][ROWS];
    sum_inputs(codes, rows, at, group * INTEGER_GROUP, INTEGER_GROUP, rows.group_sums(at, group), ahead, of_group);
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++) {
      const __m512i multiples = widen_multiples(layout.multiples(block, group, (first + half) * LANES));
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++)
        sums[half][row] = _mm512_add_epi32(sums[half][row], _mm512_mullo_epi32(of_group[half][row], multiples));
    }
  }
}

// Compute the sums of block `at` of the rows, for HALVES halves of a panel from `first` on. ahead: see `sum_part`.
template <int BITS, int ROWS, int HALVES>
inline void sum_block(const IntegerLayout& layout, const uint8_t* block, int first, const IntegerRows& rows, int64_t at,
                      int64_t ahead, WholeSums (&sums)[HALVES][ROWS]) {
  __m512i found[HALVES][ROWS];
  const bool is_wide = BITS == 8 || rows.is_wide(at);
  if (is_wide) sum_bytes<BITS, ROWS, true, HALVES>(layout, block, first, rows, at, ahead, found);
  else sum_bytes<BITS, ROWS, false, HALVES>(layout, block, first, rows, at, ahead, found);
#pragma GCC unroll 2
  for (int half = 0; half < HALVES; half++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
      sums[half][row] = (WholeSums)(is_wide ? found[half][row] : _mm512_slli_epi32(found[half][row], 8));
}

}  // namespace eagleray

#endif

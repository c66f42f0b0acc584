// Products with weights of few bits that are integers, for rows that are integers as well, of 16 bits or 8
// (integer_rows.h).
//
// The products of a block are added up without rounding, by whatever instructions and in whatever order: of bytes
// (integer_bytes.h), of pairs of 16 bits (integer_pairs.h), of matrices (integer_matrices.h). The sum is multiplied by
// the scales of the weight and of the row, and added to the total, block by block. So a row has the same bits in any
// company, although few rows are multiplied by vectors, for which codes stay in registers, and more rows by matrix
// instructions where there are any.
//
// A weight of 4 bits whose groups have scales that are multiples of one scale of the block (`CGrouping.block`) is the
// integer code * multiple, of 8 bits, so that a block takes as many matrix instructions as bfloat16 would.
#pragma once

#include "integer_bytes.h"
#include "integer_pairs.h"

#ifdef HAS_INTEGER_PRODUCTS

namespace eagleray {

constexpr int VECTOR_ROWS = BY_MATRIX<Bf16> ? 4 : TILE_ROWS<Bf16>;  // the most rows that vectors multiply together
static_assert(VECTOR_ROWS <= INTEGER_ROWS);

// Add the products of rows with blocks of a panel to sums [ROWS, PANEL], or begin them.
template <int BITS, int ROWS>
void multiply_integer_vectors(const IntegerLayout& layout, const IntegerRows& rows, const BlockSpan& blocks, float* sums,
                              PrefetchWithLines prefetch) {
  constexpr int REGISTERS_TOGETHER = registers_together(ROWS);
  Sums totals[PANEL_REGISTERS][ROWS];
#pragma GCC unroll 8
  for (int i = 0; i < PANEL_REGISTERS; i++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
      totals[i][row] = blocks.begin > 0 ? read<Sums>(sums + row * PANEL + i * WIDTH) : Sums{};

  const uint8_t* block = blocks.from;
  for (int64_t at = blocks.begin; at < blocks.begin + blocks.count; at++, block += layout.bytes) {
    int64_t ahead = 0;
    if (reads_once(prefetch)) {  // prefetches are spread over the block
      ahead = pass_by(prefetch, layout.vectors) - reinterpret_cast<const char*>(block);
      layout.prefetch_scales(block + ahead);
    } else {
      advance_by(prefetch, layout.vectors);
    }
    const BlockScales scales(layout, block);
#pragma GCC unroll 8
    for (int first = 0; first < PANEL_REGISTERS; first += REGISTERS_TOGETHER) {
      WholeSums products[REGISTERS_TOGETHER][ROWS];
      sum_block<BITS>(layout, block, first, rows, at, ahead, products);
#pragma GCC unroll 8
      for (int i = 0; i < REGISTERS_TOGETHER; i++)
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
          Sums& total = totals[first + i][row];
          total = scales.add(total, first + i, products[i][row], rows.scale(at, row));
        }
    }
    if (!layout.has_offsets) continue;
#pragma GCC unroll 8
    for (int i = 0; i < PANEL_REGISTERS; i++)
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++)
        totals[i][row] = scales.add_offsets(totals[i][row], i, rows.total(at, row));
  }
#pragma GCC unroll 8
  for (int i = 0; i < PANEL_REGISTERS; i++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) std::memcpy(sums + row * PANEL + i * WIDTH, &totals[i][row], sizeof(Sums));
}

using IntegerVectors = void (*)(const IntegerLayout&, const IntegerRows&, const BlockSpan&, float*, PrefetchWithLines);

template <int BITS, int... ROWS>
constexpr std::array<IntegerVectors, sizeof...(ROWS)> list_integer_vectors(std::integer_sequence<int, ROWS...>) {
  return {multiply_integer_vectors<BITS, ROWS + 1>...};
}

// The function for 1 to VECTOR_ROWS rows.
inline IntegerVectors choose_integer_vectors(const IntegerLayout& layout, int64_t rows) {
  using Sizes = std::make_integer_sequence<int, VECTOR_ROWS>;
  static constexpr auto of_4_bits = list_integer_vectors<4>(Sizes{}), of_8_bits = list_integer_vectors<8>(Sizes{});
  return (layout.bits == 4 ? of_4_bits : of_8_bits)[rows - 1];
}

}  // namespace eagleray

#endif

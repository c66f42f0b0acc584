// Tiles of weights of few bits, see grouped.h: a few rows times some groups of a panel. With matrix instructions
// matrix_groups.h has them.
//
// Where the processor multiplies pairs by one instruction, codes are decoded in registers, by each tile anew: this takes
// less time than writing decoded values and reading them again. Elsewhere groups are decoded to memory, once for all
// tiles of a block.
#pragma once

#include "grouped.h"
#include "product_tile.h"

#ifndef HAS_MATRICES

namespace eagleray {

// The sums of the inputs of groups, which offsets are multiplied with, by row of the tile. Null without offsets.
using InputSums = const float* const*;

constexpr int GROUPED_TILE_ROWS = TILE_ROWS<Bf16>;

// Memory for decoded groups, bfloat16 pairs [groups][pairs][PANEL]. A single tile has room for one group, which it
// decodes anew; `are_decoded`: an earlier tile has decoded all of them. Not used where codes are decoded in registers.
struct DecodedGroups {
  Bf16* pairs;
  int64_t stride;  // of groups
  bool are_decoded;
};

#ifdef __AVX512BF16__

constexpr bool DECODES_TO_MEMORY = false;

// The number of halves of a panel, 16 outputs each, that a tile multiplies together. Few rows have registers for both.
constexpr int halves_of(int rows) { return rows <= 4 ? 2 : 1; }

// Add the products of the groups first, ..., first + GROUPS - 1 to total [ROWS][2], in order, for the halves of the
// panel from `begin` on.
template <class Decode, class Rows, int ROWS, int GROUPS>
inline void add_groups(const Decode& decoder, const Rows& rows, const BlockSpan& groups, int64_t first, int begin,
                       InputSums input_sums, Floats (&total)[ROWS][2], PrefetchWithLines& prefetch) {
  constexpr int HALVES = halves_of(ROWS);
  const CGrouping& grouping = groups.grouping;
  const int64_t chunks = code_bytes(grouping) / (2 * CODE_VECTOR), pairs_of_group = grouping.size / 2;
  const int64_t stride = block_bytes(grouping);
  const uint8_t* from = groups.block(first) + begin * CODE_VECTOR;
  Floats partial[GROUPS][ROWS][HALVES] = {};
  for (int64_t chunk = 0; chunk < chunks; chunk++, from += 2 * CODE_VECTOR) {
#pragma GCC unroll 4
    for (int group = 0; group < GROUPS; group++) {
      const int64_t pair = (first + group) * pairs_of_group + chunk * Decode::PAIRS;
#pragma GCC unroll 2
      for (int half = 0; half < HALVES; half++) {
        advance(prefetch);
        Words weights[Decode::PAIRS];
        decoder.decode(from + group * stride + half * CODE_VECTOR, weights);
#pragma GCC unroll 4
        for (int i = 0; i < Decode::PAIRS; i++)
#pragma GCC unroll 16
          for (int row = 0; row < ROWS; row++)
            partial[group][row][half] =
                dot(partial[group][row][half], Pairs<Bf16>{weights[i]}, splat_pair(rows.at(row, pair + i)));
      }
    }
  }
#pragma GCC unroll 4
  for (int group = 0; group < GROUPS; group++)
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++) {
      const int to = begin + half;
      const Floats scale = load_scales(grouping, groups.scales(first + group), to * LANES);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++)
        total[row][to] = add_scaled(total[row][to], scale, partial[group][row][half]);
      if (!grouping.has_offsets) continue;
      const Floats offset = load_scales(grouping, groups.offsets(first + group), to * LANES);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++)
        total[row][to] = add_scaled(total[row][to], offset, splat(input_sums[row][groups.begin + first + group]));
    }
}

// x: as of `multiply_tile`, read from the inputs of the first group on. sums: [ROWS, PANEL]; if these are not the first
// groups of the panel, they already hold the sums of those before.
template <class Decode, int ROWS, template <class, int> class X>
void multiply_grouped_tile(const Decode& decoder, const Bf16* const* x, const BlockSpan& groups, InputSums input_sums,
                           float* sums, DecodedGroups, PrefetchWithLines prefetch) {
  constexpr int GROUPS = ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1;  // at a time, since products in a row wait for each other
  constexpr int64_t SHORT = 32;                              // the processor itself overlaps groups up to this size
  const X<Bf16, ROWS> rows(x, groups.begin * groups.grouping.size);
  Floats total[ROWS][2];
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
      total[row][half] = groups.begin > 0 ? load(sums + row * PANEL + half * LANES) : Floats{};
  int64_t group = 0;
  if (GROUPS > 1 && groups.grouping.size > SHORT)
    for (; group + GROUPS <= groups.count; group += GROUPS)
      add_groups<Decode, X<Bf16, ROWS>, ROWS, GROUPS>(decoder, rows, groups, group, 0, input_sums, total, prefetch);
  for (; group < groups.count; group++)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half += halves_of(ROWS))
      add_groups<Decode, X<Bf16, ROWS>, ROWS, 1>(decoder, rows, groups, group, half, input_sums, total, prefetch);
  std::memcpy(sums, total, sizeof total);
}

#else

constexpr bool DECODES_TO_MEMORY = true;

// Decode a group to bfloat16 pairs [pairs][PANEL], as a weight without groups is packed.
template <class Decode>
void decode_group(const Decode& decoder, const BlockSpan& groups, int64_t group, Bf16* out) {
  const int64_t chunks = code_bytes(groups.grouping) / (2 * CODE_VECTOR);
  const uint8_t* from = groups.block(group);
  for (int64_t chunk = 0; chunk < chunks; chunk++, out += Decode::PAIRS * PANEL * 2)
    for (int half = 0; half < 2; half++, from += CODE_VECTOR)
      decoder.decode(from, reinterpret_cast<Words*>(out) + half, PANEL / LANES);
}

template <class Decode, int ROWS, template <class, int> class X>
void multiply_grouped_tile(const Decode& decoder, const Bf16* const* x, const BlockSpan& groups, InputSums input_sums,
                           float* sums, DecodedGroups decoded, PrefetchWithLines prefetch) {
  const CGrouping& grouping = groups.grouping;
  const int64_t pairs = grouping.size / 2;
  alignas(64) float products[ROWS * PANEL];
  if (groups.begin == 0) std::fill_n(sums, ROWS * PANEL, 0.0f);
  for (int64_t group = 0; group < groups.count; group++) {
    Bf16* weight = decoded.pairs + group * decoded.stride;
    if (!decoded.are_decoded) decode_group(decoder, groups, group, weight);
    multiply_tile<Bf16, PrefetchWithLines, ROWS, X>(x, (groups.begin + group) * grouping.size, weight, pairs, products,
                                                    false, prefetch);
    for (int at = 0; at < PANEL; at += WIDTH) {
      const Sums scale = load_scales(grouping, groups.scales(group), at);
      const Sums offset = grouping.has_offsets ? load_scales(grouping, groups.offsets(group), at) : Sums{};
      for (int row = 0; row < ROWS; row++) {
        float* to = sums + row * PANEL + at;
        Sums total = add_scaled(read<Sums>(to), scale, read<Sums>(products + row * PANEL + at));
        if (grouping.has_offsets)
          total = add_scaled(total, offset, splat_to(Sums{}, input_sums[row] + groups.begin + group));
        std::memcpy(to, &total, sizeof total);
      }
    }
  }
}

#endif

template <class Decode>
using GroupedTile = void (*)(const Decode&, const Bf16* const*, const BlockSpan&, InputSums, float*, DecodedGroups,
                             PrefetchWithLines);

template <class Decode, template <class, int> class X, int... ROWS>
constexpr std::array<GroupedTile<Decode>, sizeof...(ROWS)> list_grouped_tiles(std::integer_sequence<int, ROWS...>) {
  return {multiply_grouped_tile<Decode, ROWS + 1, X>...};
}

// The function for a tile of 1 to GROUPED_TILE_ROWS rows.
template <class Decode>
inline GroupedTile<Decode> choose_grouped_tile(int64_t rows, bool is_interleaved) {
  using Sizes = std::make_integer_sequence<int, GROUPED_TILE_ROWS>;
  static constexpr auto separate = list_grouped_tiles<Decode, SeparateRows>(Sizes{});
  static constexpr auto interleaved = list_grouped_tiles<Decode, InterleavedRows>(Sizes{});
  return (is_interleaved ? interleaved : separate)[rows - 1];
}

}  // namespace eagleray

#endif

// Products with weights of integers by instructions that multiply matrices of bytes (AMX), see integer_tile.h.
#pragma once

#include <optional>

#include "integer_bytes.h"
#include "matrix_tile.h"

#ifdef HAS_MATRICES

namespace eagleray {

constexpr int64_t DECODED_INPUTS = 256;  // inputs whose decoded integers are kept

// The most inputs of a part of k. The part's integers and the rows and sums of a tile fit into the first-level cache together,
// so the integers stay there while every tile is multiplied by them.
constexpr int64_t most_inputs(int64_t bits) { return bits == 4 ? DECODED_INPUTS : 512; }

// Integers of blocks, [block / 4][PANEL][4].
struct DecodedBlocks {
  alignas(64) uint8_t bytes[DECODED_INPUTS * PANEL];

  uint8_t* block(int64_t index, int64_t size) { return bytes + index * size % DECODED_INPUTS * PANEL; }
};

// Decode codes of 4 bits: (code - ZERO_4) * multiple for each. Two codes lie in a word of 16 bits and are multiplied
// together, because a product with the multiple's magnitude fits into a byte. Where the multiple is negative,
// 15 - code takes the place of the code, and 15 - ZERO_4 that of ZERO_4.
inline void decode_integers(const IntegerLayout& layout, const uint8_t* block, uint8_t* to) {
  static_assert(15 * MAX_MULTIPLE < 256 && 15 - ZERO_4 == ZERO_4 - 1 && ZERO_4 == 1 << 3);
  constexpr int64_t GROUP_VECTORS = INTEGER_GROUP / 8;
  const __m512i nibbles = _mm512_set1_epi8(15), first_bytes = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
  const uint8_t* from = block;
  for (int64_t group = 0; group < layout.block / INTEGER_GROUP; group++) {
    for (int half = 0; half < 2; half++) {
      const __m512i multiple = layout.has_multiples ? widen_multiples(layout.multiples(block, group, half * LANES))
                                                    : _mm512_set1_epi32(1);
      const __m512i negative = _mm512_srai_epi32(multiple, 31), flip = _mm512_and_si512(negative, nibbles);
      const __m512i magnitudes = _mm512_shuffle_epi8(_mm512_abs_epi32(multiple), first_bytes);
      const __m512i factors = _mm512_and_si512(magnitudes, _mm512_set1_epi16(0x00ff));
      const __m512i zeros = _mm512_sub_epi8(_mm512_slli_epi16(magnitudes, 3), _mm512_and_si512(magnitudes, negative));
      auto decode = [&](__m512i codes) {
        const __m512i flipped = _mm512_ternarylogic_epi32(codes, nibbles, flip, 0x6a);  // (codes & nibbles) ^ flip
        return _mm512_sub_epi8(_mm512_mullo_epi16(flipped, factors), zeros);
      };
#pragma GCC unroll 4
      for (int64_t vector = 0; vector < GROUP_VECTORS; vector++) {
        const __m512i codes = _mm512_loadu_si512(from + (2 * vector + half) * CODE_VECTOR);
        uint8_t* at = to + (4 * vector + half) * CODE_VECTOR;
        _mm512_store_si512(at, decode(codes));
        _mm512_store_si512(at + 2 * CODE_VECTOR, decode(_mm512_srli_epi16(codes, 4)));
      }
    }
    from += 2 * GROUP_VECTORS * CODE_VECTOR, to += INTEGER_GROUP * PANEL;
  }
}

// The products of two matrices of rows with a block, with both halves of a panel.
struct BlockProducts {
  alignas(64) int32_t first[2][INTEGER_ROWS * LANES], second[2][INTEGER_ROWS * LANES];

  template <bool HAS_TWO>
  void store() {
    _tile_stored(FIRST_SUMS_1, first[0], 64);
    _tile_stored(SECOND_SUMS_1, second[0], 64);
    if (!HAS_TWO) return;
    _tile_stored(FIRST_SUMS_2, first[1], 64);
    _tile_stored(SECOND_SUMS_2, second[1], 64);
  }
};

// The products of a part of a tile with a block, which are still to be scaled and added to sums [count, PANEL].
struct PendingProducts {
  const BlockProducts* products;
  int upper;       // the matrix of the upper bytes
  bool has_lower;  // the other one is that of the lower bytes
  const float* row_scales;
  const float* row_totals;
  int64_t count;
  float* sums;
};

// Scale and add some of the rows.
template <bool HAS_OFFSETS, bool HAS_LOWER>
inline void add_rows(const PendingProducts& pending, BlockScales scales, Span rows) {
  const int32_t *first = pending.products->first[pending.upper], *second = pending.products->second[pending.upper];
  constexpr int64_t LOWER = INTEGER_ROWS * LANES;  // from the upper bytes' products to those of the lower bytes
  auto integers = [](const int32_t* upper) {
    const __m512i high = _mm512_load_si512(upper);
    return (WholeSums)(HAS_LOWER ? join_halves(high, _mm512_load_si512(upper + LOWER)) : high);
  };
  if (!HAS_LOWER)  // a power of two rounds nothing, so the result is that of joining with lower bytes of 0
    for (auto& scale : scales.scales) scale *= 256.0f;
#pragma GCC unroll 4
  for (int64_t row = rows.begin; row < rows.end; row++) {
    float* to = pending.sums + row * PANEL;
    const float scale = pending.row_scales[row];
    const WholeSums products[] = {integers(first + row * LANES), integers(second + row * LANES)};
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      Sums total = scales.add(load(to + half * LANES), half, products[half], scale);
      if (HAS_OFFSETS) total = scales.add_offsets(total, half, pending.row_totals[row]);
      store(to + half * LANES, total);
    }
  }
}

// The upper or lower bytes of a part's rows in a block, a matrix for each step.
struct RowBytes {
  const int8_t* from;
  int64_t stride;  // of steps
};

// Multiply one or two matrices of rows with the integers of a block of `size` inputs. The results are in the registers.
// vectors: of codes, that advance the prefetching with each step. IS_NEAR: the integers are in the first-level cache;
// else the next step's are prefetched into it, a quarter before each load, see `multiply_steps`. between(step) is
// called once the matrix instructions of a step are issued, and does other work while they execute.
template <bool HAS_TWO, bool IS_NEAR, class Between>
inline void multiply_block(RowBytes rows, RowBytes rows_2, const uint8_t* integers, int64_t size,
                           PrefetchWithLines& prefetch, int64_t vectors, Between&& between) {
  constexpr int64_t BYTES = INTEGER_STEP * PANEL, QUARTER = BYTES / 4;  // of a step's integers
  auto fetch_quarter = [&](int quarter) {
    if (quarter % 2 == 0) fetch_to_second_level(prefetch, vectors / 2);
    const uint8_t* next = integers + BYTES + quarter * QUARTER;
#pragma GCC unroll 16
    for (int64_t at = 0; !IS_NEAR && at < QUARTER; at += CACHE_LINE) __builtin_prefetch(next + at);
  };
  _tile_zero(FIRST_SUMS_1);
  _tile_zero(SECOND_SUMS_1);
  if (HAS_TWO) {
    _tile_zero(FIRST_SUMS_2);
    _tile_zero(SECOND_SUMS_2);
  }
  for (int64_t input = 0; input < size; input += INTEGER_STEP, integers += BYTES) {
    fetch_quarter(0);
    _tile_loadd(FIRST_BYTES, integers, 4 * PANEL);
    fetch_quarter(1);
    _tile_loadd(ROWS_1, rows.from, INTEGER_STEP);
    fetch_quarter(2);
    _tile_loadd(SECOND_BYTES, integers + 4 * LANES, 4 * PANEL);
    fetch_quarter(3);
    _tile_dpbssd(FIRST_SUMS_1, ROWS_1, FIRST_BYTES);
    _tile_dpbssd(SECOND_SUMS_1, ROWS_1, SECOND_BYTES);
    rows.from += rows.stride;
    if (HAS_TWO) {
      _tile_loadd(ROWS_2, rows_2.from, INTEGER_STEP);
      _tile_dpbssd(FIRST_SUMS_2, ROWS_2, FIRST_BYTES);
      _tile_dpbssd(SECOND_SUMS_2, ROWS_2, SECOND_BYTES);
      rows_2.from += rows_2.stride;
    }
    between(input / INTEGER_STEP);
  }
}

// Add the products of the parts of a tile, INTEGER_ROWS rows each but the last, with blocks to sums [rows, PANEL], or
// begin them. While a block is multiplied, the products of the block before are scaled, a share of the rows after each step, so
// that neither waits for the other. IS_CODED: 4 bits, which are decoded to `decoded`; is_decoded: it holds the blocks already.
template <bool IS_CODED, bool HAS_OFFSETS>
void multiply_integer_matrices(const IntegerLayout& layout, const IntegerRows* parts, int64_t num_parts,
                               const BlockSpan& blocks, DecodedBlocks& decoded, bool is_decoded, float* sums,
                               PrefetchWithLines prefetch) {
  BlockProducts products[2];
  int buffer = 0;
  PendingProducts pending[2];
  int num_pending = 0;
  std::optional<BlockScales> scales;  // of the pending products' block
  MatrixRegisters::size_for_integers(num_parts > 1 ? INTEGER_ROWS : parts[0].count);  // beyond a part they do not count
  if (blocks.begin == 0)
    for (int64_t part = 0; part < num_parts; part++)
      std::fill_n(sums + part * INTEGER_ROWS * PANEL, parts[part].count * PANEL, 0.0f);
  const int64_t steps = layout.block / INTEGER_STEP;
  auto add_pending = [&](int64_t first, int64_t last) {
    for (int i = 0; i < num_pending; i++) {
      const Span rows{pending[i].count * first / steps, pending[i].count * last / steps};
      if (!IS_CODED || pending[i].has_lower) add_rows<HAS_OFFSETS, true>(pending[i], *scales, rows);
      else add_rows<HAS_OFFSETS, false>(pending[i], *scales, rows);
    }
  };
  auto add_share = [&](int64_t step) { add_pending(step, step + 1); };  // of the block before

  const uint8_t* block = blocks.from;
  for (int64_t at = blocks.begin; at < blocks.begin + blocks.count; at++, block += layout.bytes) {
    uint8_t* decoded_block = decoded.block(at - blocks.begin, layout.block);
    const uint8_t* integers = IS_CODED ? decoded_block : block;
    if (IS_CODED && !is_decoded) decode_integers(layout, block, decoded_block);
    for (int64_t part = 0, taken = 1; part < num_parts; part += taken, buffer ^= 1) {
      const IntegerRows& rows = parts[part];
      const int64_t vectors = part == 0 ? layout.vectors * INTEGER_STEP / layout.block : 0;
      const bool is_wide = !IS_CODED || rows.is_wide(at);  // rows beside weights of 8 bits always are
      taken = !is_wide && part + 1 < num_parts && !parts[part + 1].is_wide(at) ? 2 : 1;
      const bool has_two = is_wide || taken == 2;
      const RowBytes upper{rows.high(at), rows.stride()};
      RowBytes second = upper;  // of either kind
      if (is_wide) second.from = rows.low(at);
      else if (has_two) second = {parts[part + 1].high(at), parts[part + 1].stride()};
      auto multiply = [&](auto two, auto near) {
        multiply_block<two(), near()>(upper, second, integers, layout.block, prefetch, vectors, add_share);
      };
      if (!has_two) multiply(std::false_type(), std::true_type());  // narrow rows exist beside 4 bits alone
      else if (IS_CODED || part > 0) multiply(std::true_type(), std::true_type());
      else multiply(std::true_type(), std::false_type());  // the first part fetches the codes
      if (part == 0) scales.emplace(layout, block);
      if (has_two) products[buffer].store<true>();
      else products[buffer].store<false>();
      for (num_pending = 0; num_pending < taken; num_pending++) {
        const IntegerRows& own = parts[part + num_pending];
        const int64_t first = at * own.count;
        pending[num_pending] = {&products[buffer], num_pending, is_wide, own.scales + first, own.totals + first, own.count,
                                sums + (part + num_pending) * INTEGER_ROWS * PANEL};
      }
    }
  }
  add_pending(0, steps);
}

using IntegerMatrices = void (*)(const IntegerLayout&, const IntegerRows*, int64_t, const BlockSpan&, DecodedBlocks&,
                                 bool, float*, PrefetchWithLines);

// The function for more rows.
inline IntegerMatrices choose_integer_matrices(const IntegerLayout& layout) {
  if (layout.bits == 4)
    return layout.has_offsets ? multiply_integer_matrices<true, true> : multiply_integer_matrices<true, false>;
  return layout.has_offsets ? multiply_integer_matrices<false, true> : multiply_integer_matrices<false, false>;
}

}  // namespace eagleray

#endif

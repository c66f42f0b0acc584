// Products with weights of few bits that are integers, on processors that multiply integers of 8 bits by vector
// instructions (VNNI), and perhaps by matrix instructions (AMX).
//
// Rows are integers as well, of 16 bits or 8 (integer_rows.h), so the products of a block are added up without rounding, by
// whatever instructions and in whatever order. The sum is multiplied by the scales of the weight and of the row, and
// added to the total, block by block. So a row has the same bits in any company, although few rows are multiplied by
// vectors, for which codes stay in registers, and more rows by matrix instructions where there are any.
//
// A weight of 4 bits whose groups have scales that are multiples of one scale of the block (`CGrouping.block`) is the
// integer code * multiple, of 8 bits, so that a block takes as many matrix instructions as bfloat16 would.
#pragma once

#include <optional>

#include "integer_rows.h"
#include "matrix_tile.h"

#ifdef HAS_INTEGER_PRODUCTS

namespace eagleray {

constexpr int VECTOR_ROWS = BY_MATRIX<Bf16> ? 4 : TILE_ROWS<Bf16>;  // the most rows that vectors multiply together
constexpr int ZERO_4 = 8;    // what codes of 4 bits have been increased by
constexpr int ZERO_8 = 128;  // what turns integers of 8 bits into unsigned ones
static_assert(VECTOR_ROWS <= INTEGER_ROWS);

// ---- the blocks of a panel

// The places of a block's parts, computed once for a product.
class IntegerLayout {
 public:
  const int64_t bits, block, bytes, vectors;  // bytes of a block, and vectors of codes
  const bool has_multiples, has_offsets;      // offsets of scales, or codes that stand for integers and a half

  explicit IntegerLayout(const CGrouping& grouping)
      : bits(grouping.bits),
        block(grouping.block),
        bytes(block_bytes(grouping)),
        vectors(code_bytes(grouping) / CODE_VECTOR),
        has_multiples(eagleray::has_multiples(grouping)),
        has_offsets(grouping.has_offsets || fraction_of(grouping) != 0),
        grouping_(grouping),
        fraction_(fraction_of(grouping)),
        scales_(code_bytes(grouping)),
        offsets_(scales_ + PANEL * scale_size(grouping)),
        multiples_(scales_ + scale_bytes(grouping)) {}

  __m512 scales(const uint8_t* block, int half) const {
    return (__m512)load_scales(grouping_, block + scales_, half * LANES);
  }

  // The factors of the sum of a row's inputs. They include half a scale if codes stand for an integer and a half.
  __m512 offsets(const uint8_t* block, int half, __m512 scales) const {
    const __m512 fractions = _mm512_mul_ps(scales, _mm512_set1_ps(fraction_));
    if (!grouping_.has_offsets) return fractions;
    return _mm512_add_ps(fractions, (__m512)load_scales(grouping_, block + offsets_, half * LANES));
  }

  // The multiples of a group for 16 outputs.
  __m512i multiples(const uint8_t* block, int64_t group, int half) const {
    const uint8_t* from = block + multiples_ + group * PANEL + half * LANES;
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }

  void prefetch_scales(const uint8_t* block) const {
    for (int64_t at = scales_; at < bytes; at += CACHE_LINE) __builtin_prefetch(block + at);
  }

 private:
  static float fraction_of(const CGrouping& grouping) {
    return grouping.bits == 8 ? to_float(*static_cast<const Bf16*>(grouping.values)) : 0;
  }
  const CGrouping& grouping_;
  const float fraction_;
  const int64_t scales_, offsets_, multiples_;
};

// The scales of a block.
struct BlockScales {
  __m512 scales[2], offsets[2];

  BlockScales(const IntegerLayout& layout, const uint8_t* block) {
    for (int half = 0; half < 2; half++) {
      scales[half] = layout.scales(block, half);
      if (layout.has_offsets) offsets[half] = layout.offsets(block, half, scales[half]);
    }
  }

  // total + the product of a row: `sum` are the products of integers, and `row_total` is the sum of the row's inputs.
  template <bool HAS_OFFSETS>
  __m512 add(__m512 total, int half, __m512i sum, float row_scale, float row_total) const {
    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales[half]);
    total = _mm512_fmadd_ps(scaled, _mm512_set1_ps(row_scale), total);
    if (!HAS_OFFSETS) return total;
    return _mm512_fmadd_ps(offsets[half], _mm512_set1_ps(row_total), total);
  }
};

inline __m512i join_halves(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

// ---- few rows, by vectors

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

// Compute the sums of a block, or a 256th of them, for HALVES halves of a panel from `first` on.
template <int BITS, int ROWS, bool IS_WIDE, int HALVES>
inline void sum_block(const IntegerLayout& layout, const uint8_t* block, int first, const IntegerRows& rows, int64_t at,
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
      const __m512i multiples = layout.multiples(block, group, first + half);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++)
        sums[half][row] = _mm512_add_epi32(sums[half][row], _mm512_mullo_epi32(of_group[half][row], multiples));
    }
  }
}

// Add the products of rows with blocks of a panel to sums [ROWS, PANEL], or begin them.
template <int BITS, int ROWS>
void multiply_integer_vectors(const IntegerLayout& layout, const IntegerRows& rows, const BlockSpan& blocks, float* sums,
                              PrefetchWithLines prefetch) {
  constexpr int HALVES = ROWS <= 4 ? 2 : 1;  // together; few rows have registers for both
  __m512 totals[2][ROWS];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
      totals[half][row] = blocks.begin > 0 ? (__m512)load(sums + row * PANEL + half * LANES) : _mm512_setzero_ps();

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
    auto add = layout.has_offsets ? &BlockScales::add<true> : &BlockScales::add<false>;
#pragma GCC unroll 2
    for (int first = 0; first < 2; first += HALVES) {
      __m512i products[HALVES][ROWS];
      if (BITS == 8 || rows.is_wide(at)) {
        sum_block<BITS, ROWS, true, HALVES>(layout, block, first, rows, at, ahead, products);
      } else {
        sum_block<BITS, ROWS, false, HALVES>(layout, block, first, rows, at, ahead, products);
#pragma GCC unroll 2
        for (auto& of_half : products)
#pragma GCC unroll 16
          for (auto& sum : of_half) sum = _mm512_slli_epi32(sum, 8);
      }
#pragma GCC unroll 2
      for (int half = 0; half < HALVES; half++)
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++)
          totals[first + half][row] = (scales.*add)(totals[first + half][row], first + half, products[half][row],
                                                    rows.scale(at, row), rows.total(at, row));
    }
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) store(sums + row * PANEL + half * LANES, (Floats)totals[half][row]);
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

// ---- many rows, by matrix instructions

#ifdef HAS_MATRICES

constexpr int64_t DECODED_INPUTS = 512;  // that are kept: 16 KB, which stay in the first-level cache

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
      const __m512i multiple = layout.has_multiples ? layout.multiples(block, group, half) : _mm512_set1_epi32(1);
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

template <bool HAS_OFFSETS, bool HAS_LOWER>
inline void add_rows(PendingProducts pending, BlockScales scales) {
  const int32_t *first = pending.products->first[pending.upper], *second = pending.products->second[pending.upper];
  constexpr int64_t LOWER = INTEGER_ROWS * LANES;  // from the upper bytes' products to those of the lower bytes
  auto integers = [](const int32_t* upper) {
    const __m512i high = _mm512_load_si512(upper);
    return HAS_LOWER ? join_halves(high, _mm512_load_si512(upper + LOWER)) : high;
  };
  if (!HAS_LOWER)  // a power of two rounds nothing, so the result is that of joining with lower bytes of 0
    for (auto& scale : scales.scales) scale = _mm512_mul_ps(scale, _mm512_set1_ps(256));
#pragma GCC unroll 4
  for (int64_t row = 0; row < pending.count; row++) {
    float* to = pending.sums + row * PANEL;
    const float scale = pending.row_scales[row], sum = HAS_OFFSETS ? pending.row_totals[row] : 0;
    const __m512i products[] = {integers(first + row * LANES), integers(second + row * LANES)};
    store(to, (Floats)scales.add<HAS_OFFSETS>((__m512)load(to), 0, products[0], scale, sum));
    store(to + LANES, (Floats)scales.add<HAS_OFFSETS>((__m512)load(to + LANES), 1, products[1], scale, sum));
  }
}

// The upper or lower bytes of a part's rows in a block, a matrix for each step.
struct RowBytes {
  const int8_t* from;
  int64_t stride;  // of steps
};

// Multiply one or two matrices of rows with the integers of a block of `size` inputs. The results are in the registers.
// vectors: of codes, that advance the prefetching with each step. IS_NEAR: the integers are in the first-level cache;
// else the next step's are prefetched into it, a quarter before each load, see `multiply_steps`.
template <bool HAS_TWO, bool IS_NEAR>
inline void multiply_block(RowBytes rows, RowBytes rows_2, const uint8_t* integers, int64_t size,
                           PrefetchWithLines& prefetch, int64_t vectors) {
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
  }
}

// Add the products of the parts of a tile, INTEGER_ROWS rows each but the last, with blocks to sums [rows, PANEL], or
// begin them. The products of a block are scaled after the next block has been multiplied, so that they do not wait for
// each other. IS_CODED: 4 bits, which are decoded to `decoded`; is_decoded: it holds the blocks already.
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
  auto add_pending = [&] {
    for (int i = 0; i < num_pending; i++) {
      auto add = pending[i].has_lower ? add_rows<HAS_OFFSETS, true> : add_rows<HAS_OFFSETS, false>;
      add(pending[i], *scales);
    }
  };

  const uint8_t* block = blocks.from;
  for (int64_t at = blocks.begin; at < blocks.begin + blocks.count; at++, block += layout.bytes) {
    uint8_t* decoded_block = decoded.block(at - blocks.begin, layout.block);
    const uint8_t* integers = IS_CODED ? decoded_block : block;
    if (IS_CODED && !is_decoded) decode_integers(layout, block, decoded_block);
    for (int64_t part = 0, taken = 1; part < num_parts; part += taken, buffer ^= 1) {
      const IntegerRows& rows = parts[part];
      const int64_t vectors = part == 0 ? layout.vectors * INTEGER_STEP / layout.block : 0;
      const bool is_wide = rows.is_wide(at);
      taken = !is_wide && part + 1 < num_parts && !parts[part + 1].is_wide(at) ? 2 : 1;
      const bool has_two = is_wide || taken == 2;
      const RowBytes upper{rows.high(at), rows.stride()};
      RowBytes second = upper;  // of either kind
      if (is_wide) second.from = rows.low(at);
      else if (has_two) second = {parts[part + 1].high(at), parts[part + 1].stride()};
      auto multiply = has_two ? multiply_block<true, IS_CODED> : multiply_block<false, IS_CODED>;
      multiply(upper, second, integers, layout.block, prefetch, vectors);
      add_pending();
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
  add_pending();
}

using IntegerMatrices = void (*)(const IntegerLayout&, const IntegerRows*, int64_t, const BlockSpan&, DecodedBlocks&,
                                 bool, float*, PrefetchWithLines);

// The function for more rows.
inline IntegerMatrices choose_integer_matrices(const IntegerLayout& layout) {
  if (layout.bits == 4)
    return layout.has_offsets ? multiply_integer_matrices<true, true> : multiply_integer_matrices<true, false>;
  return layout.has_offsets ? multiply_integer_matrices<false, true> : multiply_integer_matrices<false, false>;
}

#endif

}  // namespace eagleray

#endif

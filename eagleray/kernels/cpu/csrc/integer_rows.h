// Rows as integers of 16 or 8 bits, for products with weights of few bits that are integers themselves, see integer_tile.h.
//
// The inputs of a block of the weight share a scale, so an input is off by at most 2^-16 of the block's largest one.
// bfloat16, in which the inputs arrive, was off by up to 2^-9 of each. Beside weights of 4 bits, whose own rounding is ten
// times as coarse, 8 bits suffice: they halve the multiplications. But a block whose largest input is far above the
// others, which would be rounded away, keeps 16 bits.
#pragma once

#include <algorithm>

#include "grouped.h"
#include "product_tile.h"

#ifdef HAS_INTEGER_PRODUCTS

namespace eagleray {

constexpr int INTEGER_ROWS = 16;      // of a part of a tile
constexpr int64_t INTEGER_STEP = 64;  // inputs of a matrix instruction
constexpr int MAX_PEAK = 24;          // the largest input of a block that gets 8 bits, divided by the mean magnitude

// Up to INTEGER_ROWS rows, block by block. An integer is one number of 16 bits or, for instructions that multiply bytes,
// 256 * high + low. Where it has 8 bits, low is 0.
struct IntegerRows {
  int64_t count, block;          // rows, and the inputs of a block
  int64_t groups;                // groups of a block whose sums are kept; 0: only the sum of the block is kept
  int8_t* integers;              // [blocks * block / INTEGER_STEP][count][INTEGER_STEP] of 16 bits, or with [high, low]
                                 // before [count] of 8 bits
  float* scales;                 // [blocks][count]
  float* totals;                 // [blocks][count]: the sum of the inputs, as they were rounded
  int32_t* sums;                 // [blocks][groups + 1][count]: the integers of each group, and of the block
  uint8_t* wide;                 // [blocks]: 1 if a row has integers of 16 bits in the block

#ifdef HAS_BYTE_PRODUCTS
  // The upper and lower bytes of INTEGER_STEP inputs of a row, from input `first` of the block on.
  int8_t* high(int64_t at, int64_t first = 0, int64_t row = 0) const { return step(at, first) + row * INTEGER_STEP; }
  int8_t* low(int64_t at, int64_t first = 0, int64_t row = 0) const { return high(at, first, count + row); }
#else
  // INTEGER_STEP inputs of a row, from input `first` of the block on.
  Int16* whole(int64_t at, int64_t first = 0, int64_t row = 0) const {
    return reinterpret_cast<Int16*>(step(at, first)) + row * INTEGER_STEP;
  }
#endif
  int64_t stride() const { return 2 * count * INTEGER_STEP; }  // bytes from one INTEGER_STEP inputs to the next
  float scale(int64_t at, int64_t row) const { return scales[at * count + row]; }
  float total(int64_t at, int64_t row) const { return totals[at * count + row]; }
  const int32_t* group_sums(int64_t at, int64_t group) const { return sums + (at * (groups + 1) + group) * count; }
  const int32_t* block_sums(int64_t at) const { return group_sums(at, groups); }
  bool is_wide(int64_t at) const { return wide[at]; }

 private:
  int8_t* step(int64_t at, int64_t first) const { return integers + 2 * count * (at * block + first); }
};

// The bytes of up to INTEGER_ROWS rows of k inputs, with sums of groups. Matrix instructions may read all INTEGER_ROWS rows of
// each block.
inline int64_t integer_rows_bytes(const CGrouping& grouping, int64_t k) {
  const int64_t blocks = num_blocks(grouping, k), groups = grouping.block / INTEGER_GROUP;
  return round_up(INTEGER_ROWS * (2 * k + 4 * blocks * (groups + 3)) + blocks, 64);
}

// Lay out rows in memory of that size; nothing is written yet. keeps_groups: whether each group's sum is kept, beside that of
// the block.
inline IntegerRows integer_rows_in(const CGrouping& grouping, int64_t rows, int64_t k, bool keeps_groups, char* memory) {
  const int64_t blocks = num_blocks(grouping, k), count = INTEGER_ROWS * blocks;
  const int64_t groups = keeps_groups ? grouping.block / INTEGER_GROUP : 0;
  auto scales = reinterpret_cast<float*>(memory + 2 * INTEGER_ROWS * k);
  auto sums = reinterpret_cast<int32_t*>(scales + 2 * count);
  auto wide = reinterpret_cast<uint8_t*>(sums + (groups + 1) * count);
  std::fill_n(wide, blocks, uint8_t(0));
  return {rows, grouping.block, groups, reinterpret_cast<int8_t*>(memory), scales, scales + count, sums, wide};
}

// The largest magnitude of a block's inputs; NaN if one of them is NaN, whose bits are above those of infinity.
inline float largest_magnitude(const Bf16* x, int64_t size) {
  Ints largest{};
  for (int64_t at = 0; at < size; at += LANES)
    largest = max(largest, __builtin_convertvector(read<Halves>(x + at), Ints) & 0x7fff);
  return to_float(Bf16{uint16_t(highest(largest))});
}

// Running totals over the inputs of a block. Each lane holds a partial sum.
struct IntegerSums {
  Ints groups[INTEGER_STEP / INTEGER_GROUP];  // integers of the current step's groups, or of all steps if groups are not kept
  Ints magnitudes;                            // magnitudes of the upper bytes, only where BITS is 8
};

#ifdef HAS_BYTE_PRODUCTS

// Convert INTEGER_STEP inputs x of a row to integers of BITS bits, x * `inverse` rounded, write them from input `first` of
// block `at` on, and add them to `sums`.
template <int BITS>
inline void write_step(const Bf16* x, float inverse, int64_t at, int64_t first, int64_t row, const IntegerRows& to,
                       IntegerSums& sums) {
  __m512i words[2], upper[2];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++, x += 2 * LANES) {
    const Ints front = round_to_ints(load(x) * inverse), back = round_to_ints(load(x + LANES) * inverse);
    words[half] = _mm512_packs_epi32((__m512i)front, (__m512i)back);
    const __m512i factors = _mm512_set1_epi16(BITS == 8 ? 256 : 1);
    sums.groups[half] = (Ints)_mm512_dpwssd_epi32((__m512i)sums.groups[half], words[half], factors);
    upper[half] = BITS == 8 ? words[half] : _mm512_srai_epi16(_mm512_add_epi16(words[half], _mm512_set1_epi16(128)), 8);
  }
  // The two packing instructions interleave their operands by groups of four inputs; this restores the order.
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  auto pack = [=](__m512i front, __m512i back) {
    return _mm512_permutexvar_epi32(in_order, _mm512_packs_epi16(front, back));
  };
  auto lower = [&](int half) { return _mm512_sub_epi16(words[half], _mm512_slli_epi16(upper[half], 8)); };
  const __m512i high = pack(upper[0], upper[1]);
  _mm512_storeu_si512(to.high(at, first, row), high);
  _mm512_storeu_si512(to.low(at, first, row), BITS == 8 ? _mm512_setzero_si512() : pack(lower(0), lower(1)));
  if (BITS == 8)
    sums.magnitudes = (Ints)_mm512_dpbusd_epi32((__m512i)sums.magnitudes, _mm512_abs_epi8(high), _mm512_set1_epi8(1));
}

#else

template <int BITS>
inline void write_step(const Bf16* x, float inverse, int64_t at, int64_t first, int64_t row, const IntegerRows& to,
                       IntegerSums& sums) {
  for (int64_t i = 0; i < INTEGER_STEP; i += LANES) {
    Ints integers = round_to_ints(load(x + i) * inverse);
    if (BITS == 8) {
      sums.magnitudes += magnitude(integers);
      integers <<= 8;
    }
    sums.groups[i / INTEGER_GROUP] += integers;
    const Int16s whole = __builtin_convertvector(integers, Int16s);
    std::memcpy(static_cast<void*>(to.whole(at, first, row) + i), &whole, sizeof whole);
  }
}

#endif

// Write a block of one row as integers of BITS bits, x * `inverse` rounded. Return the sum of the magnitudes of their
// upper bytes, if BITS is 8.
template <int BITS>
inline int32_t write_block(const Bf16* x, float inverse, int64_t at, int64_t row, const IntegerRows& to) {
  int32_t* of_groups = to.sums + at * (to.groups + 1) * to.count + row;
  int32_t total = 0;
  IntegerSums sums{};
  for (int64_t first = 0; first < to.block; first += INTEGER_STEP) {
    write_step<BITS>(x + first, inverse, at, first, row, to, sums);
    if (to.groups == 0) continue;
    for (auto& of_group : sums.groups) {
      total += *of_groups = sum(of_group);
      of_groups += to.count;
      of_group = Ints{};
    }
  }
  *of_groups = to.groups ? total : sum(sums.groups[0] + sums.groups[1]);
  return sum(sums.magnitudes);
}

// Write the integers of a block of one row. `bits`: of the weight's codes. A block with an infinity or NaN has no finite
// scale, so its products have no finite result.
inline void write_integers(const Bf16* x, int64_t bits, int64_t at, int64_t row, const IntegerRows& to) {
  constexpr float LIMIT = 127, NEGLIGIBLE = 1e-30f;  // the integers of smaller numbers would overflow
  const float largest = largest_magnitude(x, to.block);
  const bool is_negligible = largest < NEGLIGIBLE;
  const float scale = is_negligible ? 0 : largest / (256 * LIMIT);
  bool is_wide = bits == 8;
  if (!is_wide) {
    const int32_t magnitudes = write_block<8>(x, is_negligible ? 0 : LIMIT / largest, at, row, to);
    is_wide = !is_negligible && MAX_PEAK * magnitudes < int32_t(LIMIT) * to.block;
  }
  if (is_wide) {
    write_block<16>(x, is_negligible ? 0 : 256 * LIMIT / largest, at, row, to);
    to.wide[at] = 1;
  }
  to.scales[at * to.count + row] = scale;
  to.totals[at * to.count + row] = scale * float(to.block_sums(at)[row]);
}

}  // namespace eagleray

#endif

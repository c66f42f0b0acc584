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
  int64_t count, block, groups;  // rows, and the inputs and groups of INTEGER_GROUP inputs of a block
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

// The bytes of up to INTEGER_ROWS rows of k inputs. Matrix instructions may read all INTEGER_ROWS rows of each block.
inline int64_t integer_rows_bytes(const CGrouping& grouping, int64_t k) {
  const int64_t blocks = num_blocks(grouping, k), groups = grouping.block / INTEGER_GROUP;
  return round_up(INTEGER_ROWS * (2 * k + 4 * blocks * (groups + 3)) + blocks, 64);
}

// Rows in memory of that size, which are still to be written.
inline IntegerRows integer_rows_in(const CGrouping& grouping, int64_t rows, int64_t k, char* memory) {
  const int64_t blocks = num_blocks(grouping, k), groups = grouping.block / INTEGER_GROUP, count = INTEGER_ROWS * blocks;
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

// Store LANES inputs of a row, from input i of the block on. Return the integers' upper bytes, rounded.
inline Ints store_integers(Ints integers, int64_t at, int64_t i, int64_t row, const IntegerRows& to) {
  const int64_t first = i / INTEGER_STEP * INTEGER_STEP;
  const Ints upper = (integers + 128) >> 8;
#ifdef HAS_BYTE_PRODUCTS
  const Int8s high = __builtin_convertvector(upper, Int8s), low = __builtin_convertvector(integers, Int8s);
  std::memcpy(to.high(at, first, row) + i - first, &high, sizeof high);
  std::memcpy(to.low(at, first, row) + i - first, &low, sizeof low);
#else
  const Int16s whole = __builtin_convertvector(integers, Int16s);
  std::memcpy(static_cast<void*>(to.whole(at, first, row) + i - first), &whole, sizeof whole);
#endif
  return upper;
}

// Write a block of one row as integers of BITS bits, x * `inverse` rounded. Return the sum of the magnitudes of their
// upper bytes.
template <int BITS>
inline int32_t write_block(const Bf16* x, float inverse, int64_t at, int64_t row, const IntegerRows& to) {
  int32_t total = 0;
  Ints magnitudes{};
  for (int64_t group = 0; group < to.groups; group++) {
    Ints of_group{};
    for (int64_t i = group * INTEGER_GROUP; i < (group + 1) * INTEGER_GROUP; i += LANES) {
      Ints integers = round_to_ints(load(x + i) * inverse);
      if (BITS == 8) integers <<= 8;
      magnitudes += magnitude(store_integers(integers, at, i, row, to));
      of_group += integers;
    }
    const int32_t total_of_group = sum(of_group);
    to.sums[(at * (to.groups + 1) + group) * to.count + row] = total_of_group;
    total += total_of_group;
  }
  to.sums[(at * (to.groups + 1) + to.groups) * to.count + row] = total;
  return sum(magnitudes);
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

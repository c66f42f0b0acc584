// The blocks of weights that are multiplied as integers, and how their sums become numbers, see integer_tile.h.
#pragma once

#include "integer_rows.h"

#ifdef HAS_INTEGER_PRODUCTS

namespace eagleray {

constexpr int ZERO_4 = 8;  // what codes of 4 bits have been increased by

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

  // WIDTH scales from output `first` on.
  Sums scales(const uint8_t* block, int64_t first) const { return load_scales(grouping_, block + scales_, first); }

  // The factors of the sum of a row's inputs. They include half a scale if codes stand for an integer and a half.
  Sums offsets(const uint8_t* block, int64_t first, Sums scales) const {
    const Sums fractions = scales * fraction_;
    if (!grouping_.has_offsets) return fractions;
    return fractions + load_scales(grouping_, block + offsets_, first);
  }

  // The multiples of a group, from output `first` on.
  const int8_t* multiples(const uint8_t* block, int64_t group, int64_t first) const {
    return reinterpret_cast<const int8_t*>(block + multiples_ + group * PANEL + first);
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

// The scales of a block, by registers of WIDTH outputs.
struct BlockScales {
  Sums scales[PANEL_REGISTERS], offsets[PANEL_REGISTERS];

  BlockScales(const IntegerLayout& layout, const uint8_t* block) {
#pragma GCC unroll 8
    for (int i = 0; i < PANEL_REGISTERS; i++) {
      scales[i] = layout.scales(block, i * WIDTH);
      if (layout.has_offsets) offsets[i] = layout.offsets(block, i * WIDTH, scales[i]);
    }
  }

  // total + the product of a row, without offsets, in register i. sum: of the products of integers.
  Sums add(Sums total, int i, WholeSums sum, float row_scale) const {
    return add_scaled(total, splat_to(Sums{}, &row_scale), __builtin_convertvector(sum, Sums) * scales[i]);
  }

  // total + the part of the offsets. row_total: the sum of the row's inputs.
  Sums add_offsets(Sums total, int i, float row_total) const {
    return add_scaled(total, splat_to(Sums{}, &row_total), offsets[i]);
  }
};

}  // namespace eagleray

#endif

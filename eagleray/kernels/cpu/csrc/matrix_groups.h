// Products with weights of few bits by matrix instructions.
//
// Codes are decoded to the numbers of the weight, scale * value + offset rounded to bfloat16, and these are multiplied
// step by step as a weight of bfloat16 is, so a row's sums have the same bits in any company. The outputs of a panel are
// the rows of the first matrix and the rows of the product are the columns of the second, unlike in matrix_tile.h: then
// a vector has 32 inputs of one output, and the 16 numbers that codes of 4 bits stand for in a group are computed once.
#pragma once

#include "grouped.h"
#include "matrix_tile.h"

#ifdef HAS_MATRICES

namespace eagleray {

constexpr int64_t DECODED_STEPS = 8;  // that are kept: 16 KB, which stay in the first-level cache
constexpr int64_t STEP_INPUTS = 2 * STEP_PAIRS;
static_assert(STEP_INPUTS == MIN_BLOCK);

// Numbers of a panel, [step][PANEL][STEP_INPUTS].
struct DecodedSteps {
  alignas(64) Bf16 numbers[DECODED_STEPS * PANEL * STEP_INPUTS];

  const Bf16* of_output(int64_t step, int64_t output) const { return numbers + (step * PANEL + output) * STEP_INPUTS; }
};

// ---- decoders: from the codes of a block, and its scales, to numbers

// The scales and offsets of a block's one or two groups.
class BlockFactors {
 public:
  BlockFactors(const CGrouping& grouping, const uint8_t* block) {
    const uint8_t* from = block + code_bytes(grouping);
    for (int group = 0; group < (is_split(grouping) ? 2 : 1); group++, from += scale_bytes(grouping))
      for (int at = 0; at < PANEL; at += LANES) {
        store(scales_[group] + at, load_scales(grouping, from, at));
        if (grouping.has_offsets)
          store(offsets_[group] + at, load_scales(grouping, from + PANEL * scale_size(grouping), at));
      }
  }
  static bool is_split(const CGrouping& grouping) { return grouping.size < MIN_BLOCK; }

  template <bool HAS_OFFSETS>
  Floats apply(Floats values, int group, int output) const {
    const Floats scale = splat(scales_[group][output]);
    return HAS_OFFSETS ? values * scale + splat(offsets_[group][output]) : values * scale;
  }

 private:
  alignas(64) float scales_[2][PANEL], offsets_[2][PANEL];
};

// [first, second], rounded to nearest even.
inline __m512i round_both(Floats first, Floats second) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

template <int BITS>
class MatrixDecoder;

// The numbers of the 16 codes are computed for each output and group, and looked up. Two outputs, or two groups of one,
// share a table.
template <>
class MatrixDecoder<4> {
 public:
  explicit MatrixDecoder(const CGrouping& grouping)
      : grouping_(grouping), values_(load(static_cast<const Bf16*>(grouping.values))) {}

  template <bool IS_SPLIT, bool HAS_OFFSETS>
  void decode(const uint8_t* block, Bf16* to, PrefetchWithLines& prefetch) const {
    constexpr int OUTPUTS = decoded_pairs(4);
    const BlockFactors factors(grouping_, block);
    const int64_t steps = block_size(grouping_) / STEP_INPUTS;
    const __m512i code = _mm512_set1_epi16(15), upper_table = _mm512_set1_epi16(16);
    const __m512i upper_lanes = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    for (int output = 0; output < PANEL; output += OUTPUTS) {
      Floats numbers[OUTPUTS];
      __m512i tables[OUTPUTS];
#pragma GCC unroll 4
      for (int i = 0; i < OUTPUTS; i++) numbers[i] = factors.apply<HAS_OFFSETS>(values_, 0, output + i);
#pragma GCC unroll 4
      for (int i = 0; i < OUTPUTS; i++)
        if (IS_SPLIT) tables[i] = round_both(numbers[i], factors.apply<HAS_OFFSETS>(values_, 1, output + i));
        else tables[i] = i % 2 ? tables[i - 1] : round_both(numbers[i], numbers[i | 1]);
      const uint8_t* from = block + output / OUTPUTS * CODE_VECTOR;
      Bf16* at = to + output * STEP_INPUTS;
      for (int64_t step = 0; step < steps; step++, from += PANEL / OUTPUTS * CODE_VECTOR, at += PANEL * STEP_INPUTS) {
        advance_by(prefetch, 1);
        const __m512i codes = _mm512_loadu_si512(from);
#pragma GCC unroll 4
        for (int i = 0; i < OUTPUTS; i++) {
          const __m512i which = IS_SPLIT ? upper_lanes : i % 2 ? upper_table : _mm512_setzero_si512();
          const __m512i index =
              _mm512_ternarylogic_epi32(_mm512_srli_epi16(codes, 4 * i), code, which, 0xea);  // (index & code) | which
          _mm512_store_si512(at + i * STEP_INPUTS, _mm512_permutexvar_epi16(index, tables[i]));
        }
      }
    }
  }

  const CGrouping& grouping() const { return grouping_; }

 private:
  const CGrouping& grouping_;
  const Floats values_;
};

// Integers are converted, other values are looked up. A word has an input of the first 16 and the one 16 further.
template <>
class MatrixDecoder<8> {
 public:
  explicit MatrixDecoder(const CGrouping& grouping)
      : grouping_(grouping),
        values_(grouping),
        has_integers_(grouping.are_integers),
        zero_(splat(to_float(*static_cast<const Bf16*>(grouping.values)))) {}

  template <bool IS_SPLIT, bool HAS_OFFSETS>
  void decode(const uint8_t* block, Bf16* to, PrefetchWithLines& prefetch) const {
    if (has_integers_ && zero_[0] == 0) decode_integers<IS_SPLIT, HAS_OFFSETS, false>(block, to, prefetch);
    else if (has_integers_) decode_integers<IS_SPLIT, HAS_OFFSETS, true>(block, to, prefetch);
    else look_up<IS_SPLIT, HAS_OFFSETS>(block, to, prefetch);
  }

  const CGrouping& grouping() const { return grouping_; }

 private:
  template <bool IS_SPLIT, bool HAS_OFFSETS, bool HAS_HALVES>
  void decode_integers(const uint8_t* block, Bf16* to, PrefetchWithLines& prefetch) const {
    const BlockFactors factors(grouping_, block);
    auto integers = [&](const uint8_t* from) {
      const __m128i codes = _mm_loadu_si128(static_cast<const __m128i*>(static_cast<const void*>(from)));
      const Floats values = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
      return HAS_HALVES ? values + zero_ : values;
    };
    for (int64_t step = 0; step < block_size(grouping_) / STEP_INPUTS; step++)
      for (int output = 0; output < PANEL; output++, block += STEP_INPUTS, to += STEP_INPUTS) {
        if (output % decoded_pairs(8) == 0) advance_by(prefetch, 1);
        const Floats first = factors.apply<HAS_OFFSETS>(integers(block), 0, output);
        const Floats second = factors.apply<HAS_OFFSETS>(integers(block + LANES), IS_SPLIT ? 1 : 0, output);
        _mm512_store_si512(to, round_both(first, second));
      }
  }

  template <bool IS_SPLIT, bool HAS_OFFSETS>
  void look_up(const uint8_t* block, Bf16* to, PrefetchWithLines& prefetch) const {
    constexpr int OUTPUTS = decoded_pairs(8);
    const BlockFactors factors(grouping_, block);
    for (int64_t step = 0; step < block_size(grouping_) / STEP_INPUTS; step++)
      for (int output = 0; output < PANEL; output += OUTPUTS, block += CODE_VECTOR, to += OUTPUTS * STEP_INPUTS) {
        advance_by(prefetch, 1);
        Words pairs[OUTPUTS];
        values_.decode(block, pairs);
#pragma GCC unroll 2
        for (int i = 0; i < OUTPUTS; i++) {
          const Floats first = (Floats)(pairs[i] << 16), second = (Floats)(pairs[i] & 0xffff0000u);
          _mm512_store_si512(to + i * STEP_INPUTS,
                             round_both(factors.apply<HAS_OFFSETS>(first, 0, output + i),
                                        factors.apply<HAS_OFFSETS>(second, IS_SPLIT ? 1 : 0, output + i)));
        }
      }
  }

  const CGrouping& grouping_;
  const Decoder<8> values_;
  const bool has_integers_;
  const Floats zero_;  // the value of code 0: 0 or a half
};

// to: [steps of a block][PANEL][STEP_INPUTS]. Each vector of codes advances the prefetching.
template <class Decode>
void decode_block(const Decode& decoder, const uint8_t* block, Bf16* to, PrefetchWithLines& prefetch) {
  const CGrouping& grouping = decoder.grouping();
  const bool is_split = BlockFactors::is_split(grouping);
  if (is_split && grouping.has_offsets) decoder.template decode<true, true>(block, to, prefetch);
  else if (is_split) decoder.template decode<true, false>(block, to, prefetch);
  else if (grouping.has_offsets) decoder.template decode<false, true>(block, to, prefetch);
  else decoder.template decode<false, false>(block, to, prefetch);
}

// Call work with the decoder of a weight.
template <class Work>
inline void with_matrix_decoder(const CGrouping& grouping, Work&& work) {
  if (grouping.bits == 4) work(MatrixDecoder<4>(grouping));
  else work(MatrixDecoder<8>(grouping));
}

// Blocks of a panel that are decoded one after another, a few ahead of their use. The latest DECODED_STEPS steps are
// kept.
template <class Decode>
class BlockReader {
 public:
  BlockReader(const Decode& decoder, const BlockSpan& blocks, DecodedSteps& steps)
      : decoder_(decoder),
        steps_of_block_(block_size(blocks.grouping) / STEP_INPUTS),
        kept_(DECODED_STEPS / steps_of_block_),
        count_(blocks.count),
        from_(blocks.from),
        bytes_(block_bytes(blocks.grouping)),
        vectors_(code_bytes(blocks.grouping) / CODE_VECTOR),
        numbers_(steps.numbers) {}

  int64_t steps_of_block() const { return steps_of_block_; }

  // Return the numbers of block `index`. Blocks are read in order, each of which advances the prefetching.
  const Bf16* read(int64_t index, PrefetchWithLines& prefetch) {
    constexpr int64_t AHEAD = 3;
    if (is_decoded_) advance_by(prefetch, vectors_);
    for (; next_ < count_ && next_ <= index + std::min(AHEAD, kept_ - 1); next_++, from_ += bytes_)
      decode_block(decoder_, from_, numbers(next_), prefetch);
    return numbers(index);
  }

  // All of the blocks have been decoded already.
  void mark_decoded() { next_ = count_, is_decoded_ = true; }

 private:
  Bf16* numbers(int64_t index) const {  // kept_ is a power of 2
    return numbers_ + (index & (kept_ - 1)) * steps_of_block_ * PANEL * STEP_INPUTS;
  }

  const Decode& decoder_;
  const int64_t steps_of_block_, kept_, count_;  // in blocks
  const uint8_t* from_;
  const int64_t bytes_, vectors_;
  Bf16* const numbers_;
  int64_t next_ = 0;
  bool is_decoded_ = false;
};

// ---- tiles

// The rows of a tile as columns: one row, or rows that `interleave` interleaved.
struct MatrixColumns {
  const Bf16* from;
  int64_t pair_bytes;

  MatrixColumns(const Bf16* const* x, int64_t rows) : from(x[0]), pair_bytes(rows == 1 ? 4 : 4 * interleaved(rows)) {}
  const Bf16* at(int64_t pair) const { return from + pair * pair_bytes / 2; }
};

// The distance of outputs in the sums of a tile between its parts, [PANEL][stride].
inline int64_t sum_stride(int64_t rows) { return rows == 1 ? 1 : rows <= MATRIX_ROWS ? MATRIX_ROWS : 2 * MATRIX_ROWS; }

template <bool HAS_HIGH>
inline void multiply_step(const Bf16* weight, const Bf16* x, int64_t pair_bytes) {
  _tile_loadd(FIRST_HALF, weight, 64);
  _tile_loadd(LOW_ROWS, x, pair_bytes);
  _tile_loadd(SECOND_HALF, weight + LANES * STEP_INPUTS, 64);
  _tile_dpbf16ps(LOW_FIRST, FIRST_HALF, LOW_ROWS);
  _tile_dpbf16ps(LOW_SECOND, SECOND_HALF, LOW_ROWS);
  if (HAS_HIGH) {
    _tile_loadd(HIGH_ROWS, x + MATRIX_ROWS * 2, pair_bytes);
    _tile_dpbf16ps(HIGH_FIRST, FIRST_HALF, HIGH_ROWS);
    _tile_dpbf16ps(HIGH_SECOND, SECOND_HALF, HIGH_ROWS);
  }
}

template <bool HAS_HIGH>
inline void load_sums(const float* sums, int64_t stride, bool resume) {
  const float* second = sums + LANES * stride;
  if (resume) {
    _tile_loadd(LOW_FIRST, sums, 4 * stride);
    _tile_loadd(LOW_SECOND, second, 4 * stride);
    if (HAS_HIGH) {
      _tile_loadd(HIGH_FIRST, sums + MATRIX_ROWS, 4 * stride);
      _tile_loadd(HIGH_SECOND, second + MATRIX_ROWS, 4 * stride);
    }
  } else {
    _tile_zero(LOW_FIRST);
    _tile_zero(LOW_SECOND);
    if (HAS_HIGH) {
      _tile_zero(HIGH_FIRST);
      _tile_zero(HIGH_SECOND);
    }
  }
}

template <bool HAS_HIGH>
inline void store_sums(float* sums, int64_t stride) {
  float* second = sums + LANES * stride;
  _tile_stored(LOW_FIRST, sums, 4 * stride);
  _tile_stored(LOW_SECOND, second, 4 * stride);
  if (HAS_HIGH) {
    _tile_stored(HIGH_FIRST, sums + MATRIX_ROWS, 4 * stride);
    _tile_stored(HIGH_SECOND, second + MATRIX_ROWS, 4 * stride);
  }
}

// Add the products of a tile of 1 to 32 rows with the blocks of a part of a panel to sums [PANEL][sum_stride(rows)], or
// begin them. all_pairs: of a row.
template <bool HAS_HIGH, class Decode>
inline void add_blocks(BlockReader<Decode>& reader, const MatrixColumns& x, int64_t rows, int64_t all_pairs,
                       const BlockSpan& blocks, float* sums, PrefetchWithLines prefetch) {
  const int64_t low = HAS_HIGH ? MATRIX_ROWS : rows, high = rows - low, stride = sum_stride(rows);
  const int64_t steps_of_block = reader.steps_of_block();
  int64_t pair = blocks.begin * steps_of_block * STEP_PAIRS;
  MatrixRegisters::size_for_columns(low, high, STEP_PAIRS);
  load_sums<HAS_HIGH>(sums, stride, blocks.begin > 0);
  for (int64_t block = 0; block < blocks.count; block++) {
    const Bf16* weight = reader.read(block, prefetch);
    for (int64_t step = 0; step < steps_of_block; step++, pair += STEP_PAIRS, weight += PANEL * STEP_INPUTS) {
      if (pair + STEP_PAIRS > all_pairs) {  // the last step, if k has a rest
        store_sums<HAS_HIGH>(sums, stride);
        MatrixRegisters::size_for_columns(low, high, all_pairs - pair);
        load_sums<HAS_HIGH>(sums, stride, true);
      }
      multiply_step<HAS_HIGH>(weight, x.at(pair), x.pair_bytes);
    }
  }
  store_sums<HAS_HIGH>(sums, stride);
}

// Turn the sums of a tile, [PANEL][sum_stride(rows)], into [rows][PANEL].
inline void transpose_sums(float* sums, int64_t rows) {
  if (rows == 1) return;
  const int64_t stride = sum_stride(rows);
  alignas(64) float outputs[PANEL * 2 * MATRIX_ROWS];
  std::memcpy(outputs, sums, size_t(PANEL * stride) * sizeof(float));
  const Bf16* from[PANEL];
  for (int output = 0; output < PANEL; output++) from[output] = reinterpret_cast<const Bf16*>(outputs + output * stride);
  interleave(from, PANEL, rows, reinterpret_cast<Bf16*>(sums));  // moves words of 32 bits
}

}  // namespace eagleray

#endif

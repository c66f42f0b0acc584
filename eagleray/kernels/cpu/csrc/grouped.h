// Weights of few bits: codes of 4 or 8 bits, of which a group of consecutive inputs shares a scale.
//
// The number of a code is scale * value + offset, where the value is found in a table of bfloat16 numbers, so one kernel
// serves integers, MXFP4, NF4 and FP8. A product multiplies the values with the inputs of a group, in pairs and in
// order, and adds the sum times the scale to its total, group by group, whatever the number of rows.
//
// A packed weight consists of panels of PANEL outputs, as other weights do. A panel has its blocks one after another. A
// block is a group, or with matrix instructions, which take 32 inputs, two groups of 16:
//   codes    [chunks][2][64 bytes], each 64 bytes the codes of 16 outputs for 2 * decoded_pairs inputs; with matrix
//            instructions [block / 32][chunks][64 bytes], those of 32 inputs for decoded_pairs outputs (`pack_codes`)
// and for each group
//   scales   [PANEL]
//   offsets  [PANEL], if the weight has offsets
// Weights that are multiplied as integers have another layout, see `pack_integers`.
#pragma once

#include "product.h"

namespace eagleray {

constexpr int64_t MAX_GROUP_PAIRS = 128;
constexpr int64_t CODE_VECTOR = 64;  // bytes of codes that are decoded together

#ifdef HAS_MATRICES
constexpr int64_t MIN_BLOCK = 32;  // inputs
#else
constexpr int64_t MIN_BLOCK = 16;
#endif

constexpr int64_t INTEGER_GROUP = 32;  // inputs whose scales have one multiple, where a block has several

// Whether a weight is packed and multiplied as integers, see integer_tile.h. Smaller blocks take less time otherwise.
inline bool uses_integers(const CGrouping& grouping) {
#ifdef HAS_INTEGER_PRODUCTS
  const bool has_divisor = grouping.bits == 4 && grouping.size == INTEGER_GROUP && !grouping.has_offsets &&
                           grouping.scale_kind == SCALE_FLOAT16;
  return grouping.are_integers && grouping.block % 64 == 0 && (grouping.block == grouping.size || has_divisor);
#else
  return grouping.bits == 0;  // no weight is
#endif
}

// Whether the scales of a block are stored as multiples of one.
inline bool has_multiples(const CGrouping& grouping) {
  return uses_integers(grouping) && grouping.block > grouping.size;
}

// Words of 16 lanes that a vector of codes is decoded to, see `Decoder`.
constexpr int decoded_pairs(int bits) { return 16 / bits; }

inline int64_t scale_size(const CGrouping& grouping) { return grouping.scale_kind == SCALE_FLOAT32 ? 4 : 2; }
inline int64_t block_size(const CGrouping& grouping) {
  if (uses_integers(grouping)) return grouping.block;
  return grouping.size > MIN_BLOCK ? grouping.size : MIN_BLOCK;
}
inline int64_t code_bytes(const CGrouping& grouping) { return PANEL * block_size(grouping) * grouping.bits / 8; }

// The bytes of the scales and offsets of a group.
inline int64_t scale_bytes(const CGrouping& grouping) {
  return PANEL * scale_size(grouping) * (grouping.has_offsets ? 2 : 1);
}
inline int64_t block_bytes(const CGrouping& grouping) {
  if (uses_integers(grouping)) {
    const int64_t multiples = has_multiples(grouping) ? PANEL * grouping.block / grouping.size : 0;
    return code_bytes(grouping) + scale_bytes(grouping) + multiples;
  }
  return code_bytes(grouping) + block_size(grouping) / grouping.size * scale_bytes(grouping);
}
inline int64_t num_blocks(const CGrouping& grouping, int64_t k) { return divide_up(k, block_size(grouping)); }
inline int64_t panel_bytes(const CGrouping& grouping, int64_t k) {
  return num_blocks(grouping, k) * block_bytes(grouping);
}

// ---- scales

// Every float16 number is exact in float32, also the denormal ones.
inline Floats load_float16(const void* from) {
#ifdef __AVX512F__
  __m256i halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Floats)_mm512_cvtph_ps(halves);
#else
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  Words words = __builtin_convertvector(halves, Words), magnitude = (words & 0x7fff) << 13;
  Floats value;
  std::memcpy(&value, &magnitude, sizeof value);
  value *= 0x1p112f;  // the difference of the exponents' biases
  Words bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= (words & 0x8000) << 16;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// 16 scales or offsets, from the one of output `first` on.
inline Floats load_scales(const CGrouping& grouping, const uint8_t* scales, int64_t first) {
  const uint8_t* from = scales + first * scale_size(grouping);
  if (grouping.scale_kind == SCALE_FLOAT16) return load_float16(from);
  if (grouping.scale_kind == SCALE_BFLOAT16) return load(reinterpret_cast<const Bf16*>(from));
  return load(reinterpret_cast<const float*>(from));
}

inline Floats add_scaled(Floats total, Floats scale, Floats sum) { return total + scale * sum; }

// ---- decoders. A vector of 64 bytes becomes, for each pair of inputs in order, 16 outputs with one pair of values; with
// matrix instructions, for each output in order, the values of 32 inputs.

template <int BITS>
class Decoder;

template <>
class Decoder<4> {
 public:
  static constexpr int PAIRS = decoded_pairs(4);

#if defined(__AVX512BW__)
  explicit Decoder(const CGrouping& grouping) {
    // the lookup uses five bits of an index, one more than a code has, so the table is there twice
    __m256i values = _mm256_loadu_si256(static_cast<const __m256i*>(static_cast<const void*>(grouping.values)));
    table_ = _mm512_broadcast_i64x4(values);
  }
  void decode(const uint8_t* from, Words* pairs) const {
    const __m512i codes = _mm512_loadu_si512(from);
#pragma GCC unroll 4
    for (int pair = 0; pair < PAIRS; pair++)
      pairs[pair] = (Words)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * pair), table_);
  }

 private:
  __m512i table_;  // 32 values
#else
  explicit Decoder(const CGrouping& grouping) {
    for (int code = 0; code < 16; code++) {
      uint16_t value;
      std::memcpy(&value, static_cast<const char*>(grouping.values) + 2 * code, sizeof value);
      low_[code] = uint8_t(value), high_[code] = uint8_t(value >> 8);
    }
  }
  void decode(const uint8_t* from, Words* pairs) const {
    for (int part = 0; part < 4; part++) {
      Eight codes;
      std::memcpy(&codes, from + part * sizeof codes, sizeof codes);
      for (int pair = 0; pair < PAIRS; pair++) {
        Bytes index = (Bytes)((codes >> (4 * pair)) & 15);  // the upper byte of a word looks up the value of code 0
        Eight low = (Eight)__builtin_shuffle(low_, index) & 0xff, high = (Eight)__builtin_shuffle(high_, index) << 8;
        Eight values = low | high;
        std::memcpy(reinterpret_cast<char*>(pairs + pair) + part * sizeof values, &values, sizeof values);
      }
    }
  }

 private:
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  typedef uint16_t Eight __attribute__((vector_size(16)));
  Bytes low_, high_;
#endif
};

// The lower seven bits of a code are the index of its value, the eighth is the value's sign.
template <>
class Decoder<8> {
 public:
  static constexpr int PAIRS = decoded_pairs(8);

#if defined(__AVX512VBMI__)
  explicit Decoder(const CGrouping& grouping) {
    alignas(64) uint8_t bytes[2][128];
    for (int code = 0; code < 128; code++)
      for (int half = 0; half < 2; half++)
        bytes[half][code] = static_cast<const uint8_t*>(grouping.values)[2 * code + half];
    for (int half = 0; half < 2; half++)
      for (int part = 0; part < 2; part++) tables_[half][part] = _mm512_load_si512(bytes[half] + 64 * part);
  }
  void decode(const uint8_t* from, Words* pairs) const {
    const __m512i codes = _mm512_loadu_si512(from);
    const __m512i low = _mm512_permutex2var_epi8(tables_[0][0], codes, tables_[0][1]);
    __m512i high = _mm512_permutex2var_epi8(tables_[1][0], codes, tables_[1][1]);
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(int8_t(0x80)), 0xf8);  // high | (codes & 0x80)
    pairs[0] = (Words)_mm512_unpacklo_epi8(low, high);
    pairs[1] = (Words)_mm512_unpackhi_epi8(low, high);
  }

 private:
  __m512i tables_[2][2];  // lower and upper bytes of the 128 values
#else
  explicit Decoder(const CGrouping& grouping) { std::memcpy(values_, grouping.values, sizeof values_); }
  void decode(const uint8_t* from, Words* pairs) const {
    for (int pair = 0; pair < PAIRS; pair++) {
      uint16_t decoded[2 * LANES];
      for (int i = 0; i < 2 * LANES; i++) {
        uint8_t code = from[i / 8 * 16 + pair * 8 + i % 8];
        decoded[i] = uint16_t(values_[code & 0x7f] | (code & 0x80) << 8);
      }
      std::memcpy(pairs + pair, decoded, sizeof decoded);
    }
  }

 private:
  uint16_t values_[128];
#endif
};

// Call work with the decoder of a weight.
template <class Work>
inline void with_decoder(const CGrouping& grouping, Work&& work) {
  if (grouping.bits == 4) work(Decoder<4>(grouping));
  else work(Decoder<8>(grouping));
}

// ---- parts of a panel

// Consecutive blocks of a packed panel.
struct BlockSpan {
  const CGrouping& grouping;
  const uint8_t* from;   // the first block
  int64_t begin, count;  // its number in the panel, and the number of blocks

  const uint8_t* block(int64_t index) const { return from + index * block_bytes(grouping); }
  const uint8_t* scales(int64_t index) const { return block(index) + code_bytes(grouping); }
  const uint8_t* offsets(int64_t index) const { return scales(index) + PANEL * scale_size(grouping); }
  const uint8_t* multiples(int64_t index) const { return scales(index) + scale_bytes(grouping); }
};

// The number of bytes of a packed weight of n outputs; those of gate and up are padded together.
int64_t grouped_size(const CGrouping& grouping, int64_t n, int64_t k);

// out [k] = the numbers of a row of a packed weight.
void unpack_grouped_row(const CGrouping& grouping, const void* packed, int64_t row, int64_t k, float* out);

// The sums of each group's inputs, which offsets are multiplied with: out [k / grouping.size].
void sum_groups(const CGrouping& grouping, const Bf16* x, int64_t k, float* out);

}  // namespace eagleray

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

#include "product_tile.h"

namespace eagleray {

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

// Scales are loaded, and sums of products scaled, by registers of WIDTH outputs, of which a panel has PANEL_REGISTERS. GCC
// copies vectors that are longer than a register in parts of other sizes, which then wait for each other in the cache.
constexpr int PANEL_REGISTERS = PANEL / WIDTH;

typedef uint16_t RegisterOfHalves __attribute__((vector_size(2 * WIDTH)));

// Every float16 number is exact in float32, also the denormal ones.
inline Sums load_float16(const void* from) {
#if defined(__AVX512F__)
  __m256i halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Sums)_mm512_cvtph_ps(halves);
#elif defined(__F16C__)
  return (Sums)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#else
  const Bits words = __builtin_convertvector(read<RegisterOfHalves>(from), Bits);
  const Sums value = (Sums)((words & 0x7fff) << 13) * 0x1p112f;  // the difference of the exponents' biases
  return (Sums)((Bits)value | (words & 0x8000) << 16);
#endif
}

// WIDTH scales or offsets, from the one of output `first` on.
inline Sums load_scales(const CGrouping& grouping, const uint8_t* scales, int64_t first) {
  const uint8_t* from = scales + first * scale_size(grouping);
  if (grouping.scale_kind == SCALE_FLOAT16) return load_float16(from);
  if (grouping.scale_kind == SCALE_BFLOAT16)
    return (Sums)(__builtin_convertvector(read<RegisterOfHalves>(from), Bits) << 16);
  return read<Sums>(from);
}

// total + scale * sum, rounded once where the processor can. The compiler would decide that for each place in the code by
// itself, so a row might have other bits beside other rows.
inline Sums add_scaled(Sums total, Sums scale, Sums sum) {
#if defined(__AVX512F__)
  return (Sums)_mm512_fmadd_ps((__m512)scale, (__m512)sum, (__m512)total);
#elif defined(__FMA__)
  return (Sums)_mm256_fmadd_ps((__m256)scale, (__m256)sum, (__m256)total);
#elif defined(__aarch64__)
  return (Sums)vfmaq_f32((float32x4_t)total, (float32x4_t)scale, (float32x4_t)sum);
#else
  return total + scale * sum;
#endif
}

// ---- decoders. A vector of 64 bytes becomes, for each pair of inputs in order, 16 outputs with one pair of values; with
// matrix instructions, for each output in order, the values of 32 inputs. They are `stride` vectors of 16 words apart.

template <int BITS>
class Decoder;

// Store a register of decoded words as a part of 16 lanes. Registers are stored as they are read again, since smaller
// parts would have to reach the cache first.
inline void store_part(Bits words, Words* to, size_t offset) {
  std::memcpy(reinterpret_cast<char*>(to) + offset, &words, sizeof words);
}

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
  void decode(const uint8_t* from, Words* pairs, int stride = 1) const {
    const __m512i codes = _mm512_loadu_si512(from);
#pragma GCC unroll 4
    for (int pair = 0; pair < PAIRS; pair++)
      pairs[pair * stride] = (Words)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * pair), table_);
  }

 private:
  __m512i table_;  // 32 values
#else
  explicit Decoder(const CGrouping& grouping) {
    for (int code = 0; code < 16; code++) {
      uint16_t value;
      std::memcpy(&value, static_cast<const char*>(grouping.values) + 2 * code, sizeof value);
      for (size_t table = 0; table < sizeof(Bytes); table += 16)
        low_[table + code] = uint8_t(value), high_[table + code] = uint8_t(value >> 8);
    }
  }
  void decode(const uint8_t* from, Words* pairs, int stride = 1) const {
    for (size_t at = 0; at < CODE_VECTOR; at += sizeof(Bytes)) {
      const auto codes = read<Halfwords>(from + at);
      for (int pair = 0; pair < PAIRS; pair++) {
        const Bytes index = (Bytes)((codes >> (4 * pair)) & 15);  // upper bytes look up the value of code 0
        store_part((Bits)(((Halfwords)lookup(low_, index) & 0xff) | ((Halfwords)lookup(high_, index) << 8)), pairs + pair * stride, at);
      }
    }
  }

 private:
  typedef uint8_t Bytes __attribute__((vector_size(4 * WIDTH)));
  typedef uint16_t Halfwords __attribute__((vector_size(4 * WIDTH)));

  static Bytes lookup(Bytes table, Bytes index) {
#ifdef __AVX2__
    return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);  // in each half
#else
    return __builtin_shuffle(table, index);
#endif
  }
  Bytes low_, high_;  // of the values, once for each 16 bytes
#endif
};

// The lower seven bits of a code are the number of its value, the eighth is the value's sign.
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
  void decode(const uint8_t* from, Words* pairs, int stride = 1) const {
    const __m512i codes = _mm512_loadu_si512(from);
    const __m512i low = _mm512_permutex2var_epi8(tables_[0][0], codes, tables_[0][1]);
    __m512i high = _mm512_permutex2var_epi8(tables_[1][0], codes, tables_[1][1]);
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(int8_t(0x80)), 0xf8);  // high | (codes & 0x80)
    pairs[0] = (Words)_mm512_unpacklo_epi8(low, high);
    pairs[stride] = (Words)_mm512_unpackhi_epi8(low, high);
  }

 private:
  __m512i tables_[2][2];  // lower and upper bytes of the 128 values
#else
  // Values are computed from codes: integers, or integers and a half, by conversion, and those of FP8 as floats whose
  // exponents have another bias. A lookup in a table of 128 values would take one code at a time.
  explicit Decoder(const CGrouping& grouping)
      : are_integers_(grouping.are_integers), fraction_(to_float(*static_cast<const Bf16*>(grouping.values))) {}
  void decode(const uint8_t* from, Words* pairs, int stride = 1) const {
    for (size_t at = 0; at < CODE_VECTOR; at += sizeof(Bits)) {
      store_part(decode_words(widen_pair<0>(from + at)), pairs, at);
      store_part(decode_words(widen_pair<1>(from + at)), pairs + stride, at);
    }
  }

 private:
  // The codes of a pair as words of two, of each 16 bytes one half.
  template <int PAIR>
  static Bits widen_pair(const uint8_t* from) {
#if defined(__AVX512BW__)
    auto unpack = PAIR == 0 ? _mm512_unpacklo_epi8 : _mm512_unpackhi_epi8;
    return (Bits)unpack(read<__m512i>(from), _mm512_setzero_si512());
#elif defined(__AVX2__)
    auto unpack = PAIR == 0 ? _mm256_unpacklo_epi8 : _mm256_unpackhi_epi8;
    return (Bits)unpack(read<__m256i>(from), _mm256_setzero_si256());
#else
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    constexpr uint8_t i = 8 * PAIR;
    const Bytes order = {i, 16, i + 1, 16, i + 2, 16, i + 3, 16, i + 4, 16, i + 5, 16, i + 6, 16, i + 7, 16};
    Bytes parts[sizeof(Bits) / sizeof(Bytes)];
    for (Bytes& part : parts) part = __builtin_shuffle(read<Bytes>(from + (&part - parts) * sizeof part), Bytes{}, order);
    return read<Bits>(parts);
#endif
  }

  Bits decode_words(Bits codes) const {
    const Bits magnitudes = codes & 0x007f007f, signs = (codes & 0x00800080) << 8;
    Sums first, second;
    Bits nan{};
    if (are_integers_) {
      first = __builtin_convertvector((WholeSums)(magnitudes & 0xffff), Sums) + fraction_;
      second = __builtin_convertvector((WholeSums)(magnitudes >> 16), Sums) + fraction_;
    } else {
      first = (Sums)(magnitudes << 20) * 0x1p120f, second = (Sums)(magnitudes >> 16 << 20) * 0x1p120f;
      nan = (magnitudes + 0x00010001) & 0x00800080;  // of code 127
      nan = (nan << 8) - nan;                        // all bits of the exponent
    }
    return (Bits)first >> 16 | (Bits)second | signs | nan;  // the lower halves of the values are 0
  }

  const bool are_integers_;
  const float fraction_;
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

// The packing of weights of few bits, and the numbers of single rows of them.
#include "grouped.h"

#include <algorithm>
#include <numeric>

#include "integer_tile.h"
#include "matrix_groups.h"

namespace eagleray {
namespace {

// A weight before it is packed. The rows are contiguous.
struct CodedWeight {
  const uint8_t* codes;    // [n, k]
  const uint8_t* scales;   // [n, k / size] of the grouping's kind
  const uint8_t* offsets;  // the same, or null
};

#ifdef HAS_INTEGER_PRODUCTS

// ---- integers

// The integer of a code of 8 bits, which has a sign and a magnitude. The values of codes may lie half above integers.
int integer_of(uint8_t code, bool have_halves) {
  const int magnitude = code & 0x7f;
  return code & 0x80 ? -magnitude - (have_halves ? 1 : 0) : magnitude;
}

// A float16 in units of 2^-24, the smallest one. It is finite.
int64_t float16_units(uint16_t bits) {
  const int64_t mantissa = bits & 0x3ff, exponent = bits >> 10 & 31;
  const int64_t magnitude = exponent ? (mantissa | 0x400) << (exponent - 1) : mantissa;
  return bits & 0x8000 ? -magnitude : magnitude;
}

// The float16 of a number of units, which is exact and not negative.
uint16_t float16_of(int64_t units) {
  int64_t shift = 0;
  while (units >> shift >= 0x800) shift++;
  return uint16_t((shift << 10) + (units >> shift));  // the highest bit of the mantissa adds one to the exponent
}

// The scale of which those of a block are multiples, and the multiples. Zeros are multiples of every scale.
uint16_t divide_scales(const uint16_t* scales, int64_t count, int8_t* multiples, int64_t stride) {
  int64_t divisor = 0;
  for (int64_t group = 0; group < count; group++) divisor = std::gcd(divisor, float16_units(scales[group]));
  for (int64_t group = 0; group < count; group++)
    multiples[group * stride] = divisor ? int8_t(float16_units(scales[group]) / divisor) : int8_t(0);
  return float16_of(divisor);  // exact, as it divides a float16
}

// The byte of input i in an output's block. Of 4 bits, it has the code of another input, too.
int64_t place_of(const CGrouping& grouping, int64_t i, int64_t lane) {
  const int64_t row = i / INPUTS_TOGETHER * grouping.bits / 8;
  return (row * PANEL + lane) * INPUTS_TOGETHER + i % INPUTS_TOGETHER;
}

// Write a block of an output that is multiplied as integers:
//   codes      [block / TOGETHER][PANEL][TOGETHER] bytes, the integers, where TOGETHER is INPUTS_TOGETHER, or of 4 bits
//              codes [block / TOGETHER / 2][PANEL][TOGETHER], where the lower half of a byte belongs to one of TOGETHER
//              inputs and the upper half to one of the next ones
//   scales     [PANEL], of the grouping's kind
//   offsets    [PANEL], if the weight has offsets
//   multiples  [block / size][PANEL] bytes with a sign, if the groups of a block have scales of their own
void pack_integers(const CGrouping& grouping, const CodedWeight& weight, int64_t group, int64_t first, int lane,
                   uint8_t* block) {
  const uint8_t* codes = weight.codes + first;
  const bool have_halves = grouping.bits == 8 && static_cast<const Bf16*>(grouping.values)->bits != 0;
  for (int64_t i = 0; i < grouping.block; i++) {
    uint8_t* to = block + place_of(grouping, i, lane);
    if (grouping.bits == 8) *to = uint8_t(integer_of(codes[i], have_halves));
    else if (i / INPUTS_TOGETHER % 2 == 0) *to = codes[i];
    else *to |= uint8_t(codes[i] << 4);
  }
  const int64_t size = scale_size(grouping);
  uint8_t *scales = block + code_bytes(grouping), *multiples = scales + scale_bytes(grouping);
  if (has_multiples(grouping)) {
    reinterpret_cast<uint16_t*>(scales)[lane] =
        divide_scales(reinterpret_cast<const uint16_t*>(weight.scales) + group, grouping.block / grouping.size,
                      reinterpret_cast<int8_t*>(multiples) + lane, PANEL);
    return;
  }
  std::memcpy(scales + lane * size, weight.scales + group * size, size);
  if (grouping.has_offsets) std::memcpy(scales + (PANEL + lane) * size, weight.offsets + group * size, size);
}

#endif

#ifdef HAS_MATRICES

// Write the first `count` codes of an output's block. Codes of 4 bits share bytes with the output before, if it is odd.
void pack_codes(const CGrouping& grouping, const uint8_t* codes, int64_t count, int lane, uint8_t* block) {
  const int outputs = decoded_pairs(int(grouping.bits)), output = lane % outputs;
  const bool have_halves = grouping.are_integers && static_cast<const Bf16*>(grouping.values)->bits != 0;
  uint8_t* vector = block + lane / outputs * CODE_VECTOR;
  for (int64_t at = 0; at < count; at++) {
    const int64_t input = at % MIN_BLOCK;
    uint8_t* step = vector + at / MIN_BLOCK * (PANEL / outputs) * CODE_VECTOR;
    if (grouping.bits == 8 && grouping.are_integers) {
      step[output * MIN_BLOCK + input] = uint8_t(integer_of(codes[at], have_halves));
    } else if (grouping.bits == 8) {
      const int64_t word = input % 16 * 2 + input / 16;  // with the input 16 further on or back
      step[word / 8 * 16 + output * 8 + word % 8] = codes[at];
    } else if (output % 2 == 0) step[2 * input + output / 2] = codes[at];
    else step[2 * input + output / 2] |= uint8_t(codes[at] << 4);
  }
}

#else

// Four codes, of the even or the odd inputs of eight, in 16 bits.
uint16_t gather_nibbles(uint64_t bytes) {
  bytes &= 0x000f000f000f000f;
  bytes |= bytes >> 12;
  return uint16_t((bytes & 0xff) | (bytes >> 24 & 0xff00));
}

void pack_chunk(const CGrouping& grouping, const uint8_t* codes, uint8_t* to) {
  if (grouping.bits == 4) {
    uint64_t bytes;
    std::memcpy(&bytes, codes, sizeof bytes);
    uint16_t words[] = {gather_nibbles(bytes), gather_nibbles(bytes >> 8)};
    std::memcpy(to, words, sizeof words);
  } else {
    std::memcpy(to, codes, 2);
    std::memcpy(to + 8, codes + 2, 2);
  }
}

// Write the first `count` codes of an output's block.
void pack_codes(const CGrouping& grouping, const uint8_t* codes, int64_t count, int lane, uint8_t* block) {
  const int64_t inputs = 2 * decoded_pairs(int(grouping.bits)), output = lane % LANES;
  // 4 bits: a word has one input of each pair, so the two words of an output have its pairs. 8 bits: the pairs of four
  // outputs are in 16 bytes, the first pair of each before the second.
  uint8_t* to = block + lane / LANES * CODE_VECTOR + (grouping.bits == 4 ? 4 * output : output / 4 * 16 + output % 4 * 2);
  for (int64_t at = 0; at < count; at += inputs, to += 2 * CODE_VECTOR) pack_chunk(grouping, codes + at, to);
}

#endif

void pack_lane(const CGrouping& grouping, const CodedWeight& weight, int64_t row, int64_t k, int lane, uint8_t* panel) {
  const int64_t size = scale_size(grouping), groups = k / grouping.size;
  for (int64_t first = 0; first < k; first += block_size(grouping), panel += block_bytes(grouping)) {
#ifdef HAS_INTEGER_PRODUCTS
    if (uses_integers(grouping)) {
      pack_integers(grouping, weight, (row * k + first) / grouping.size, row * k + first, lane, panel);
      continue;
    }
#endif
    const int64_t count = std::min(block_size(grouping), k - first);
    pack_codes(grouping, weight.codes + row * k + first, count, lane, panel);
    uint8_t* scale = panel + code_bytes(grouping) + lane * size;
    for (int64_t group = first / grouping.size; group < (first + count) / grouping.size; group++) {
      std::memcpy(scale, weight.scales + (row * groups + group) * size, size);
      if (grouping.has_offsets)
        std::memcpy(scale + PANEL * size, weight.offsets + (row * groups + group) * size, size);
      scale += scale_bytes(grouping);
    }
  }
}

// The row of a weight that is in a lane of a panel, or -1.
int64_t row_of(int64_t panel, int lane, int64_t n, int64_t inner) {
  if (inner == 0) return panel * PANEL + lane < n ? panel * PANEL + lane : -1;
  int64_t row = panel * LANES + lane % LANES;
  return row < inner ? row + (lane < LANES ? 0 : inner) : -1;
}

// The scale or offset of an output of a panel.
float scale_at(const CGrouping& grouping, const uint8_t* scales, int64_t lane) {
  return load_scales(grouping, scales, lane / WIDTH * WIDTH)[lane % WIDTH];
}

void pack_grouped(const Shard& shard, const CGrouping& grouping, const CodedWeight& weight, int64_t n, int64_t k,
                  int64_t inner, uint8_t* out) {
  Span panels = range_of(shard, inner ? divide_up(inner, LANES) : divide_up(n, PANEL));
  for (int64_t panel = panels.begin; panel < panels.end; panel++) {
    uint8_t* to = out + panel * panel_bytes(grouping, k);
    // the outputs and inputs beyond the last ones are computed as well, with scales of zero
    if (row_of(panel, PANEL - 1, n, inner) < 0 || k % block_size(grouping) != 0)
      std::memset(to, 0, size_t(panel_bytes(grouping, k)));
    for (int lane = 0; lane < PANEL; lane++)
      if (int64_t row = row_of(panel, lane, n, inner); row >= 0) pack_lane(grouping, weight, row, k, lane, to);
  }
}

}  // namespace

int64_t grouped_size(const CGrouping& grouping, int64_t n, int64_t k) {
  return divide_up(n, PANEL) * panel_bytes(grouping, k);
}

#ifdef HAS_INTEGER_PRODUCTS

namespace {

// The numbers of an output's block of integers: out [block].
void unpack_integers(const BlockSpan& blocks, int64_t index, int64_t lane, float* out) {
  const CGrouping& grouping = blocks.grouping;
  const float half = grouping.bits == 8 ? to_float(*static_cast<const Bf16*>(grouping.values)) : 0;
  const float scale = scale_at(grouping, blocks.scales(index), lane);
  const float offset = grouping.has_offsets ? scale_at(grouping, blocks.offsets(index), lane) : 0;
  const uint8_t* codes = blocks.block(index);
  const uint8_t* multiples = has_multiples(grouping) ? blocks.multiples(index) + lane : nullptr;
  for (int64_t group = 0; group < grouping.block; group += INTEGER_GROUP) {
    const int multiple = multiples ? int8_t(multiples[group / INTEGER_GROUP * PANEL]) : 1;
    for (int64_t i = group; i < group + INTEGER_GROUP; i++) {
      const uint8_t byte = codes[place_of(grouping, i, lane)];
      const int integer = grouping.bits == 8 ? int8_t(byte) : (byte >> (i / INPUTS_TOGETHER % 2 * 4) & 15) - ZERO_4;
      *out++ = (float(integer * multiple) + half) * scale + offset;
    }
  }
}

// The numbers of a row of integers: out [k].
void unpack_integer_row(const CGrouping& grouping, const uint8_t* panel, int64_t lane, int64_t k, float* out) {
  const BlockSpan blocks{grouping, panel, 0, num_blocks(grouping, k)};
  for (int64_t index = 0; index < blocks.count; index++, out += grouping.block) unpack_integers(blocks, index, lane, out);
}

}  // namespace

#endif

#ifdef HAS_MATRICES

void unpack_grouped_row(const CGrouping& grouping, const void* packed, int64_t row, int64_t k, float* out) {
  auto panel = static_cast<const uint8_t*>(packed) + row / PANEL * panel_bytes(grouping, k);
  if (uses_integers(grouping)) return unpack_integer_row(grouping, panel, row % PANEL, k, out);
  with_matrix_decoder(grouping, [&](const auto& decoder) {
    DecodedSteps steps;
    for (int64_t first = 0; first < k; first += block_size(grouping), panel += block_bytes(grouping)) {
      PrefetchWithLines prefetch{{reinterpret_cast<const char*>(panel), 0}, nullptr, 0, 0};
      decode_block(decoder, panel, steps.numbers, prefetch);
      for (int64_t i = 0; i < std::min(block_size(grouping), k - first); i++)
        *out++ = to_float(steps.of_output(i / MIN_BLOCK, row % PANEL)[i % MIN_BLOCK]);
    }
  });
}

#else

void unpack_grouped_row(const CGrouping& grouping, const void* packed, int64_t row, int64_t k, float* out) {
  auto panel = static_cast<const uint8_t*>(packed) + row / PANEL * panel_bytes(grouping, k);
  const int64_t lane = row % PANEL;
#ifdef HAS_INTEGER_PRODUCTS
  if (uses_integers(grouping)) return unpack_integer_row(grouping, panel, lane, k, out);
#endif
  with_decoder(grouping, [&](const auto& decoder) {
    constexpr int PAIRS = std::decay_t<decltype(decoder)>::PAIRS;
    BlockSpan groups{grouping, panel, 0, k / grouping.size};
    for (int64_t group = 0; group < groups.count; group++) {
      const float scale = scale_at(grouping, groups.scales(group), lane);
      const float offset = grouping.has_offsets ? scale_at(grouping, groups.offsets(group), lane) : 0;
      for (int64_t chunk = 0; chunk < grouping.size / (2 * PAIRS); chunk++) {
        Words pairs[PAIRS];
        decoder.decode(groups.block(group) + (chunk * 2 + lane / LANES) * CODE_VECTOR, pairs);
        for (const Words& pair : pairs) {
          uint32_t values = pair[lane % LANES];
          *out++ = scale * to_float(Bf16{uint16_t(values)}) + offset;
          *out++ = scale * to_float(Bf16{uint16_t(values >> 16)}) + offset;
        }
      }
    }
  });
}

#endif

void sum_groups(const CGrouping& grouping, const Bf16* x, int64_t k, float* out) {
  for (int64_t group = 0; group < k / grouping.size; group++) {
    Floats total{};
    for (int64_t i = 0; i < grouping.size; i += LANES) total += load(x + group * grouping.size + i);
    out[group] = sum(total);
  }
}

}  // namespace eagleray

using namespace eagleray;

extern "C" {

int64_t er_grouped_size(const CGrouping* grouping, int64_t n, int64_t k) { return grouped_size(*grouping, n, k); }

int er_uses_integers(const CGrouping* grouping) { return uses_integers(*grouping); }

void er_pack_grouped(const CGrouping* grouping, const void* codes, const void* scales, const void* offsets, int64_t n,
                     int64_t k, int64_t inner, void* out, int num_threads) {
  CodedWeight weight{static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales),
                     static_cast<const uint8_t*>(offsets)};
  run_phase(num_threads, [&](Shard shard) {
    pack_grouped(shard, *grouping, weight, n, k, inner, static_cast<uint8_t*>(out));
  });
}

}  // extern "C"

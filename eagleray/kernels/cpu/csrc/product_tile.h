// A tile: a few rows times a panel of the weight. All its sums stay in registers while k advances.
//
// Each sum is computed by the same operations in the same order, however many rows the tile has.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "product.h"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace eagleray {

// ---- vectors that are exactly one register, unlike `Floats`, because a tile must fit into the registers

#if defined(__AVX512F__)
constexpr int WIDTH = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int WIDTH = 8, REGISTERS = 16;
#elif defined(__x86_64__)
constexpr int WIDTH = 4, REGISTERS = 16;
#else
constexpr int WIDTH = 4, REGISTERS = 32;
#endif

typedef float Sums __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef int16_t Shorts __attribute__((vector_size(4 * WIDTH)));
typedef int32_t WholeSums __attribute__((vector_size(4 * WIDTH)));

// A whole number, whose products with others are added up without rounding.
struct Int16 {
  int16_t value;
};

// A float that is multiplied in pairs, as numbers of 16 bits are.
struct Paired {
  float value;
};
template <>
constexpr int PAIR<Paired> = 2;

struct PairOfSums {
  Sums first, second;
};

template <class T>
struct RegisterOf {
  using Type = Bits;
};
template <>
struct RegisterOf<float> {
  using Type = Sums;
};
template <>
struct RegisterOf<Int16> {
  using Type = Shorts;
};
template <>
struct RegisterOf<Paired> {
  using Type = PairOfSums;
};

template <class T>
using Register = typename RegisterOf<T>::Type;  // of pairs
template <class T>
using SumsOf = std::conditional_t<std::is_same_v<T, Int16>, WholeSums, Sums>;  // of products of pairs

template <class Vector, class From>
inline Vector read(const From* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Sums splat_to(Sums, const float* pair) { return *pair - Sums{}; }  // unlike x + 0, x - 0 is x for every x
inline Bits splat_to(Bits, const Bf16* pair) { return Bits{} + read<uint32_t>(pair); }
inline Shorts splat_to(Shorts, const Int16* pair) { return (Shorts)(Bits{} + read<uint32_t>(pair)); }
inline PairOfSums splat_to(PairOfSums, const Paired* pair) {
  return {pair[0].value - Sums{}, pair[1].value - Sums{}};
}

inline Sums add_products(Sums total, Sums a, Sums b) { return total + a * b; }
inline Sums add_products(Sums total, Bits a, Bits b) {
#ifdef __AVX512BF16__
  return (Sums)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return vbfdotq_f32(total, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  Bits high = Bits{} + 0xffff0000u;
  return total + (Sums)(a & high) * (Sums)(b & high) + (Sums)(a << 16) * (Sums)(b << 16);
#endif
}
inline Sums add_products(Sums total, PairOfSums a, PairOfSums b) {
  return total + a.second * b.second + a.first * b.first;
}
inline WholeSums add_products(WholeSums total, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
  return (WholeSums)_mm512_dpwssd_epi32((__m512i)total, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return total + (WholeSums)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return total + (WholeSums)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX__)
  return total + (WholeSums)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  WholeSums a_high = (WholeSums)a >> 16, b_high = (WholeSums)b >> 16;
  WholeSums a_low = (WholeSums)((Bits)a << 16) >> 16, b_low = (WholeSums)((Bits)b << 16) >> 16;
  return total + a_high * b_high + a_low * b_low;
#endif
}

// Integers of 8 bits for a register of pairs of 16 bits, with a sign or without.
inline Shorts widen(const int8_t* from) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_cvtepi8_epi16(read<__m256i>(from));  // GCC converts the halves apart
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Shorts)_mm256_cvtepi8_epi16(read<__m128i>(from));
#else
  typedef int8_t Bytes __attribute__((vector_size(2 * WIDTH)));
  return __builtin_convertvector(read<Bytes>(from), Shorts);
#endif
}
inline Shorts widen(const uint8_t* from) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_cvtepu8_epi16(read<__m256i>(from));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Shorts)_mm256_cvtepu8_epi16(read<__m128i>(from));
#else
  typedef uint8_t Bytes __attribute__((vector_size(2 * WIDTH)));
  return __builtin_convertvector(read<Bytes>(from), Shorts);
#endif
}

// ---- sizes

// Whether tiles of this type are computed by the instructions of matrix_tile.h.
#ifdef HAS_MATRICES
template <class T>
constexpr bool BY_MATRIX = std::is_same_v<T, Bf16>;
#else
template <class T>
constexpr bool BY_MATRIX = false;
#endif

// Bounds of tiles are multiples of this, in rows, and bounds of parts of k in pairs.
template <class T>
constexpr int64_t ROW_GRAIN = BY_MATRIX<T> ? 16 : 1;
template <class T>
constexpr int64_t PAIR_GRAIN = BY_MATRIX<T> ? 16 : 1;

template <class T>
constexpr int TILE_ROWS = BY_MATRIX<T> ? 32 : REGISTERS == 32 ? 12 : std::is_same_v<T, float> ? 6 : 4;

// The number of registers for a row of the tile: 2, or more if few rows leave room. If they do not cover the panel, the
// tile is computed in several passes.
template <class T>
constexpr int columns_of(int rows) {
  int columns = 2;
  while (columns * WIDTH < PANEL && 2 * columns * rows <= 2 * TILE_ROWS<T>) columns *= 2;
  return columns;
}

constexpr int64_t CACHE_LINE = 64;  // bytes
constexpr int PREFETCH_BYTES = 12288;  // distance of prefetching where a panel is read once
constexpr int PREFETCH_BYTES_OF_INTEGERS = 24576;  // the same, where codes are multiplied faster than they are read

// Memory to prefetch during a tile: `pace` bytes, at most 128, with each pair of k.
struct Prefetch {
  const char* from;
  int64_t pace;
};

inline void advance(Prefetch& prefetch) {
  __builtin_prefetch(prefetch.from);
  if (prefetch.pace > CACHE_LINE) __builtin_prefetch(prefetch.from + CACHE_LINE);
  prefetch.from += prefetch.pace;
}

// Advance by `pairs` pairs of k at once.
inline void advance_by(Prefetch& prefetch, int64_t pairs) {
  const char* end = prefetch.from + pairs * prefetch.pace;
  for (const char* line = prefetch.from; line < end; line += CACHE_LINE) __builtin_prefetch(line);
  prefetch.from = end;
}

// The same, into the second-level cache.
inline void fetch_to_second_level(Prefetch& prefetch, int64_t pairs) {
  const char* end = prefetch.from + pairs * prefetch.pace;
  for (const char* line = prefetch.from; line < end; line += CACHE_LINE) __builtin_prefetch(line, 0, 2);
  prefetch.from = end;
}

// Whether a tile prefetches its own panel, which is read once, line by line.
inline bool reads_once(const Prefetch& prefetch) { return prefetch.pace >= CACHE_LINE; }

// The same as `advance_by` without prefetching: return from where the memory of these pairs is to be prefetched.
inline const char* pass_by(Prefetch& prefetch, int64_t pairs) {
  const char* from = prefetch.from;
  prefetch.from += pairs * prefetch.pace;
  return from;
}

// Cache lines that lie in many places.
class LineList {
 public:
  void add(const void* from, int64_t size) {
    int64_t added = std::min((size + CACHE_LINE - 1) / CACHE_LINE, CAPACITY - count);
    for (int64_t i = 0; i < added; i += GROUP)  // whole vectors of addresses; those beyond `added` do not count
#pragma GCC unroll 8
      for (int64_t j = 0; j < GROUP; j++)
        lines[count + i + j] = static_cast<const char*>(from) + (i + j) * CACHE_LINE;
    count += added;
  }

  static constexpr int64_t CAPACITY = 1024, GROUP = 8;
  int64_t count = 0;
  const char* lines[CAPACITY + GROUP];
};

// Memory to prefetch during a tile, and lines that are spread over its pairs and go to the second-level cache.
struct PrefetchWithLines {
  Prefetch memory;
  const char* const* lines;
  int64_t position, pace;  // in lines / 2^16; `pace` with each pair of k, 0 without lines
};

// Prefetching of either kind as one type, for tiles that would take long to compile for both. Without lines, one that is
// always the same is fetched again.
inline PrefetchWithLines with_lines(Prefetch prefetch) {
  static constexpr char line = 0;
  static constexpr const char* lines[] = {&line};
  return {prefetch, lines, 0, 0};
}
inline PrefetchWithLines with_lines(const PrefetchWithLines& prefetch) { return prefetch; }

inline void advance(PrefetchWithLines& prefetch) {
  advance(prefetch.memory);
  __builtin_prefetch(prefetch.lines[prefetch.position >> 16], 0, 2);
  prefetch.position += prefetch.pace;
}

inline bool reads_once(const PrefetchWithLines& prefetch) { return reads_once(prefetch.memory); }

// Advance the lines by `pairs` pairs of k at once.
inline void fetch_lines(PrefetchWithLines& prefetch, int64_t pairs) {
  for (int64_t pair = 0; prefetch.pace > 0 && pair < pairs; pair++, prefetch.position += prefetch.pace)
    __builtin_prefetch(prefetch.lines[prefetch.position >> 16], 0, 2);
}

inline void advance_by(PrefetchWithLines& prefetch, int64_t pairs) {
  advance_by(prefetch.memory, pairs);
  fetch_lines(prefetch, pairs);
}

inline void fetch_to_second_level(PrefetchWithLines& prefetch, int64_t pairs) {
  fetch_to_second_level(prefetch.memory, pairs);
  fetch_lines(prefetch, pairs);
}

inline const char* pass_by(PrefetchWithLines& prefetch, int64_t pairs) {
  fetch_lines(prefetch, pairs);
  return pass_by(prefetch.memory, pairs);
}

// ---- the rows of a tile

// Rows at separate addresses. This suffices for few rows, whose computation waits for the weight.
template <class T, int ROWS>
struct SeparateRows {
  const T* rows[ROWS];

  SeparateRows(const T* const* x, int64_t k) {
    for (int row = 0; row < ROWS; row++) rows[row] = x[row] + k;
  }
  const T* at(int row, int64_t pair) const { return rows[row] + pair * PAIR<T>; }
};

// Rows interleaved pair by pair along k, [pairs][interleaved(rows)][PAIR], which is the order of reading. They need one
// address, and do not evict each other from the first-level cache.
constexpr int interleaved(int64_t rows) { return int(round_up(rows, 4)); }

// The number of elements of an interleaved tile.
template <class T>
constexpr int64_t interleaved_size(int64_t pairs) {
  return interleaved(TILE_ROWS<T>) * round_up(pairs, PAIR_GRAIN<T>) * PAIR<T>;
}

template <class T, int ROWS>
struct InterleavedRows {
  const T* rows;

  InterleavedRows(const T* const* x, int64_t k) : rows(*x + k * interleaved(ROWS)) {}
  const T* at(int row, int64_t pair) const { return rows + (pair * interleaved(ROWS) + row) * PAIR<T>; }
};

typedef uint32_t Four __attribute__((vector_size(16)));

// Interleave rows of `pairs` pairs. Four rows by four pairs are transposed at a time.
template <class T>
inline void interleave(const T* const* x, int64_t rows, int64_t pairs, T* to) {
  int64_t stride = interleaved(rows);
  for (int64_t first = 0; first < stride; first += 4) {
    const T* from[4];
    for (int row = 0; row < 4; row++) from[row] = x[std::min(first + row, rows - 1)];
    T* at = to + first * PAIR<T>;
    int64_t pair = 0;
    for (; pair + 4 <= pairs; pair += 4) {
      Four a = read<Four>(from[0] + pair * PAIR<T>), b = read<Four>(from[1] + pair * PAIR<T>);
      Four c = read<Four>(from[2] + pair * PAIR<T>), d = read<Four>(from[3] + pair * PAIR<T>);
      Four ab = __builtin_shuffle(a, b, Four{0, 4, 1, 5}), ab_next = __builtin_shuffle(a, b, Four{2, 6, 3, 7});
      Four cd = __builtin_shuffle(c, d, Four{0, 4, 1, 5}), cd_next = __builtin_shuffle(c, d, Four{2, 6, 3, 7});
      Four columns[] = {__builtin_shuffle(ab, cd, Four{0, 1, 4, 5}), __builtin_shuffle(ab, cd, Four{2, 3, 6, 7}),
                        __builtin_shuffle(ab_next, cd_next, Four{0, 1, 4, 5}),
                        __builtin_shuffle(ab_next, cd_next, Four{2, 3, 6, 7})};
      for (auto& column : columns) {
        std::memcpy(at, &column, sizeof column);
        at += stride * PAIR<T>;
      }
    }
    for (; pair < pairs; pair++, at += stride * PAIR<T>)
      for (int row = 0; row < 4; row++) std::memcpy(at + row * PAIR<T>, from[row] + pair * PAIR<T>, sizeof(uint32_t));
  }
}

// ---- tiles

// sums: [ROWS, PANEL]; if `resume`, they already hold the sums over the preceding part of k. x: the rows, read from
// element `k` on, or one pointer to them if they are interleaved.
template <class T, class Ahead, int ROWS, template <class, int> class X>
void multiply_tile(const T* const* x, int64_t k, const T* weight, int64_t pairs, float* sums, bool resume,
                   Ahead prefetch) {
  constexpr int COLUMNS = columns_of<T>(ROWS);
  const X<T, ROWS> rows(x, k);

  for (int output = 0; output < PANEL; output += COLUMNS * WIDTH) {
    Sums total[ROWS][COLUMNS];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
      for (int column = 0; column < COLUMNS; column++)
        total[row][column] = resume ? read<Sums>(sums + row * PANEL + output + column * WIDTH) : Sums{};

    const T* from = weight + output * PAIR<T>;
    for (int64_t pair = 0; pair < pairs; pair++, from += PANEL * PAIR<T>) {
      if (output == 0) advance(prefetch);
      Register<T> weights[COLUMNS];
#pragma GCC unroll 16
      for (int column = 0; column < COLUMNS; column++)
        weights[column] = read<Register<T>>(from + column * WIDTH * PAIR<T>);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++) {
        Register<T> values = splat_to(Register<T>{}, rows.at(row, pair));
#pragma GCC unroll 16
        for (int column = 0; column < COLUMNS; column++)
          total[row][column] = add_products(total[row][column], weights[column], values);
      }
    }

#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
      for (int column = 0; column < COLUMNS; column++)
        std::memcpy(sums + row * PANEL + output + column * WIDTH, &total[row][column], sizeof(Sums));
  }
}

template <class T, class Ahead>
using Tile = void (*)(const T* const*, int64_t, const T*, int64_t, float*, bool, Ahead);

template <class T, class Ahead, template <class, int> class X, int... ROWS>
constexpr std::array<Tile<T, Ahead>, sizeof...(ROWS)> list_tiles(std::integer_sequence<int, ROWS...>) {
  return {multiply_tile<T, Ahead, ROWS + 1, X>...};
}

// The function for a tile of 1 to TILE_ROWS rows. Ahead: `Prefetch` or `PrefetchWithLines`
template <class T, class Ahead>
inline Tile<T, Ahead> choose_tile(int64_t rows, bool is_interleaved) {
  using Sizes = std::make_integer_sequence<int, TILE_ROWS<T>>;
  static constexpr auto separate = list_tiles<T, Ahead, SeparateRows>(Sizes{});
  static constexpr auto interleaved = list_tiles<T, Ahead, InterleavedRows>(Sizes{});
  return (is_interleaved ? interleaved : separate)[rows - 1];
}

// Interleave the rows of a tile for `multiply_rows`. to: [interleaved_size(pairs)]
template <class T>
inline void interleave_rows(const T* const* x, int64_t rows, int64_t pairs, T* to) {
  interleave(x, rows, pairs, to);
}

// Compute a tile of 1 to TILE_ROWS rows for a part of k, see `multiply_tile`. `all_pairs` is the number of pairs of a row.
template <class T, class Ahead>
inline void multiply_rows(const T* const* x, int64_t rows, bool is_interleaved, int64_t all_pairs, Span pairs,
                          const T* weight, float* sums, Ahead prefetch) {
  choose_tile<T, Ahead>(rows, is_interleaved)(x, pairs.begin * PAIR<T>, weight, pairs.end - pairs.begin, sums,
                                              pairs.begin > 0, prefetch);
}

}  // namespace eagleray

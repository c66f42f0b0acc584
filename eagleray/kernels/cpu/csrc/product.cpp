// The computation of a product, block by block.
//
// A tile must be able to read from the second-level cache, so a block fits into it: up to 8 tiles of rows, and as much
// of k as leaves room for two panels. While one panel is multiplied, the next one is prefetched, a part during each
// tile. The rows of a large block are interleaved in the order in which tiles read them, once for all its panels. Matrix
// instructions compute larger tiles (matrix_tile.h), in the same blocks.
#include "product.h"

#include <algorithm>
#include <optional>
#include <vector>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "adapters.h"
#include "grouped_tile.h"
#include "integer_matrices.h"
#include "integer_tile.h"
#include "matrix_groups.h"
#include "matrix_tile.h"
#include "product_tile.h"

namespace eagleray {
namespace {

// ---- blocks

constexpr int BLOCK_TILES = 8;
constexpr int FEW_TILES = 2;         // up to this many, rows are not interleaved
constexpr int BLOCK_PAIRS = 1024;    // along k, if there are several tiles: 4 KB of a row, 128 KB of a panel
constexpr int BLOCK_PANELS = 4;      // computed for one part of k before the next part, if k has several

// Memory of this thread for the blocks that it computes. It is kept, and grows to the size of the largest block.
struct BlockMemory {
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<uint32_t> rows;     // interleaved
  std::vector<Line> integers;     // of rows, see integer_rows.h
  std::vector<Line> decoded;      // groups of a panel, see grouped_tile.h
  std::vector<float> input_sums;  // [num_rows][groups of k]

  template <class Number>
  static Number* reserve(std::vector<Number>& memory, int64_t count) {
    if (int64_t(memory.size()) < count) memory.resize(count);
    return memory.data();
  }
};

BlockMemory& block_memory() {
  static thread_local BlockMemory memory;
  return memory;
}

// A range of a product's rows.
template <class T>
class Block {
 public:
  static constexpr int MAX_ROWS = BLOCK_TILES * TILE_ROWS<T>;

  Block(const Product<T>& product, Span rows)
      : product(product),
        begin(rows.begin),
        num_rows(rows.end - rows.begin),
        num_tiles(divide_up(num_rows, TILE_ROWS<T>)),
        num_pairs(divide_up(product.k, PAIR<T>)) {
    for (int64_t row = 0; row < num_rows; row++) x[row] = product.x + source_of(row) * product.x_stride;
#ifdef HAS_INTEGER_PRODUCTS
    if constexpr (std::is_same_v<T, Bf16>)
      if (has_integers()) convert_rows();
#endif
    if (is_interleaved()) interleave_tiles();
    if (product.adapters) adapters.emplace(*product.adapters, rows);
  }

  void multiply(Span panels) const {
    if constexpr (std::is_same_v<T, Bf16>) {
#ifdef HAS_INTEGER_PRODUCTS
      if (has_integers()) return multiply_integers(panels, *product.grouping);
#endif
      if (product.grouping) return multiply_grouped(panels, *product.grouping);
    }
    int64_t parts = num_parts();
    auto pairs_of = [&](int64_t part) { return range_of({int(part), int(parts)}, num_pairs, PAIR_GRAIN<T>); };
    visit_panels(panels, [&](Place at, std::optional<Place> next, float* sums) {
      multiply_panel(at.panel, pairs_of(at.part), next ? weight(next->panel, pairs_of(next->part).begin) : nullptr, sums);
    });
  }

 private:
  const Product<T>& product;
  int64_t begin, num_rows, num_tiles, num_pairs;
  const T* x[MAX_ROWS];  // the rows; if interleaved, the entry of a tile's first row points to the whole tile
  std::optional<AdaptedBlock<T>> adapters;
#ifdef HAS_INTEGER_PRODUCTS
  static constexpr int64_t PART_ROWS = BY_MATRIX<T> ? INTEGER_ROWS : TILE_ROWS<T>;
  IntegerRows integer_rows[BLOCK_TILES * divide_up(TILE_ROWS<T>, PART_ROWS)];  // for a weight of integers
#endif

  struct Place {
    int64_t panel, part;
  };

  int64_t source_of(int64_t row) const { return product.x_rows ? product.x_rows[begin + row] : begin + row; }

  int64_t num_parts() const {
    if (num_tiles == 1) return 1;
#ifdef HAS_MATRICES
    if (has_integers()) {
      const CGrouping& grouping = *product.grouping;
      return divide_up(num_blocks(grouping, product.k), most_inputs(grouping.bits) / grouping.block);
    }
    if (product.grouping) return divide_up(num_pairs, DECODED_STEPS * STEP_PAIRS);
#endif
    return divide_up(num_pairs, BLOCK_PAIRS);
  }

  // Visit panel after panel. A long k is divided into parts; each part is visited for a few panels, whose sums are kept
  // until the next part.
  template <class Visit>
  void visit_panels(Span panels, Visit&& visit) const {
    alignas(64) float sums[BLOCK_PANELS][MAX_ROWS * PANEL];
    int64_t parts = num_parts(), step = parts == 1 || num_tiles == 1 ? 1 : BLOCK_PANELS;
    for (int64_t first = panels.begin; first < panels.end; first += step) {
      int64_t last = std::min(first + step, panels.end);
      for (int64_t part = 0; part < parts; part++)
        for (int64_t panel = first; panel < last; panel++) {
          std::optional<Place> next;
          if (panel + 1 < last) next = Place{panel + 1, part};
          else if (part + 1 < parts) next = Place{first, part + 1};
          else if (last < panels.end) next = Place{last, 0};
          visit(Place{panel, part}, next, sums[panel - first]);
        }
    }
  }

  Span rows_of(int64_t tile) const { return range_of({int(tile), int(num_tiles)}, num_rows, ROW_GRAIN<T>); }
  bool has_integers() const { return product.grouping && uses_integers(*product.grouping); }
  bool is_interleaved() const {
    if (has_integers()) return false;
    if (!BY_MATRIX<T>) return num_tiles > FEW_TILES;
    if (product.grouping) return num_rows > 1;
    return num_tiles > 1 || (product.x_rows && num_rows > 1);  // rows that are not at equal distances
  }

  void interleave_tiles() {
    const int64_t size = interleaved_size<T>(num_pairs);
    T* to = reinterpret_cast<T*>(BlockMemory::reserve(block_memory().rows, num_tiles * size / PAIR<T>));
    for (int64_t tile = 0; tile < num_tiles; tile++, to += size) {
      Span rows = rows_of(tile);
      if (product.grouping) interleave(x + rows.begin, rows.end - rows.begin, num_pairs, to);
      else interleave_rows(x + rows.begin, rows.end - rows.begin, num_pairs, to);
      x[rows.begin] = to;
    }
  }

  const T* weight(int64_t panel, int64_t pair) const {
    return product.weight + (panel * num_pairs + pair) * PANEL * PAIR<T>;
  }

  // The address of the results of a row and a panel.
  char* results(int64_t row, int64_t panel) const {
    bool gated = is_gated(product.epilogue), is_rounded = gated || product.epilogue == EPILOGUE_ROUND;
    int64_t offset = (begin + row) * product.y_stride + panel * (gated ? LANES : PANEL);
    return static_cast<char*>(product.y) + offset * int64_t(is_rounded ? sizeof(T) : sizeof(float));
  }

  // sums: [num_rows, PANEL]. Each tile prefetches a part of `next`.
  void multiply_panel(int64_t panel, Span pairs, const T* next, float* sums) const {
    const T* from = weight(panel, pairs.begin);
    int64_t count = pairs.end - pairs.begin, pace = next ? divide_up(128, num_tiles) : 0;
    Prefetch prefetch{reinterpret_cast<const char*>(next ? next : from), pace};
    if (num_tiles == 1) prefetch = {reinterpret_cast<const char*>(from) + PREFETCH_BYTES, 128};
    visit_tiles(panel, pairs.end == num_pairs, count, prefetch, sums, [&](Span rows, float* to, auto ahead) {
      eagleray::multiply_rows(x + rows.begin, rows.end - rows.begin, is_interleaved(), num_pairs, pairs, from, to, ahead);
    });
  }

  // Compute the tiles of a part of a panel, and finish the panel after its last part. multiply_rows(rows, to, ahead)
  // computes one tile, in `count` steps that advance the prefetching.
  template <class MultiplyRows>
  void visit_tiles(int64_t panel, bool last, int64_t count, Prefetch prefetch, float* sums,
                   MultiplyRows&& multiply_rows) const {
    LineList factors;
    if (last && adapters) adapters->list_factors(panel, factors);
    int64_t line_pace = (factors.count << 16) / (num_tiles * count);

    for (int64_t tile = 0; tile < num_tiles; tile++, prefetch.from += prefetch.pace * count) {
      Span rows = rows_of(tile);
      float* to = sums + rows.begin * PANEL;
      for (int64_t row = rows.begin; last && row < rows.end; row++) {
        __builtin_prefetch(results(row, panel), 1);
        __builtin_prefetch(results(row, panel) + 64, 1);
      }
      if (line_pace > 0)
        multiply_rows(rows, to, PrefetchWithLines{prefetch, factors.lines, tile * count * line_pace, line_pace});
      else multiply_rows(rows, to, prefetch);
      if (last && !adapters) finish(panel, rows, to);
    }
    if (last && adapters) {  // for all tiles together, so that the factors are read once
      adapters->expand(panel, sums);
      finish(panel, {0, num_rows}, sums);
    }
  }

  // ---- weights of few bits

  // The blocks of a part of a panel, with bounds for all panels alike.
  BlockSpan blocks_of(const CGrouping& grouping, Place at) const {
    int64_t parts = num_parts(), total = num_blocks(grouping, product.k);
    int64_t begin = total * at.part / parts, end = total * (at.part + 1) / parts;
    auto panel = reinterpret_cast<const uint8_t*>(product.weight) + at.panel * panel_bytes(grouping, product.k);
    return {grouping, panel + begin * block_bytes(grouping), begin, end - begin};
  }

  // Visit panel after panel, and the parts of each. visit(panel, blocks, is_last, prefetch, sums): `sums` are
  // [num_rows, PANEL], and each tile advances `prefetch` with every vector of codes.
  template <class Visit>
  void visit_blocks(Span panels, const CGrouping& grouping, Visit&& visit) const {
    const int64_t bytes = block_bytes(grouping), vectors = code_bytes(grouping) / CODE_VECTOR;
    visit_panels(panels, [&](Place at, std::optional<Place> next, float* sums) {
      const BlockSpan blocks = blocks_of(grouping, at);
      auto from = reinterpret_cast<const char*>(blocks.from);
      const int64_t distance = has_integers() ? PREFETCH_BYTES_OF_INTEGERS : PREFETCH_BYTES;
      Prefetch prefetch{from + distance, divide_up(bytes, vectors)};
      if (num_tiles > 1) prefetch = {from, 0};
      if (num_tiles > 1 && next) {
        const BlockSpan following = blocks_of(grouping, *next);
        prefetch = {reinterpret_cast<const char*>(following.from),
                    divide_up(bytes * following.count, num_tiles * vectors * blocks.count)};
      }
      visit(at.panel, blocks, blocks.begin + blocks.count == num_blocks(grouping, product.k), prefetch, sums);
    });
  }

#ifdef HAS_INTEGER_PRODUCTS

  // The first of the parts of a tile's rows.
  int64_t first_part(int64_t tile) const { return tile * divide_up(TILE_ROWS<T>, PART_ROWS); }

  static bool by_matrices(Span rows) { return BY_MATRIX<T> && rows.end - rows.begin > VECTOR_ROWS; }

  void convert_rows() {
    const CGrouping& grouping = *product.grouping;
    const int64_t bytes = integer_rows_bytes(grouping, product.k), blocks = num_blocks(grouping, product.k);
    auto memory =
        BlockMemory::reserve(block_memory().integers, first_part(num_tiles) * bytes / int64_t(sizeof(BlockMemory::Line)));
    for (int64_t tile = 0; tile < num_tiles; tile++) {
      const Span rows = rows_of(tile);
      int64_t part = first_part(tile);
      const bool keeps_groups = has_multiples(grouping) && !by_matrices(rows);
      for (int64_t first = rows.begin; first < rows.end; first += PART_ROWS, part++) {
        const int64_t count = std::min(PART_ROWS, rows.end - first);
        integer_rows[part] = integer_rows_in(grouping, count, product.k, keeps_groups, memory->bytes + part * bytes);
        for (int64_t row = 0; row < count; row++)
          for (int64_t block = 0; block < blocks; block++)
            write_integers(x[first + row] + block * grouping.block, grouping.bits, block, row, integer_rows[part]);
      }
    }
  }

  void multiply_integers(Span panels, const CGrouping& grouping) const {
    const IntegerLayout layout(grouping);
#ifdef HAS_MATRICES
    DecodedBlocks decoded;
#endif
    visit_blocks(panels, grouping, [&](int64_t panel, BlockSpan blocks, bool last, Prefetch prefetch, float* sums) {
      int64_t tile = 0;
      visit_tiles(panel, last, blocks.count * layout.vectors, prefetch, sums, [&](Span rows, float* to, auto ahead) {
        const IntegerRows* parts = integer_rows + first_part(tile++);
        const int64_t count = rows.end - rows.begin;
#ifdef HAS_MATRICES
        if (by_matrices(rows))
          return choose_integer_matrices(layout)(layout, parts, divide_up(count, INTEGER_ROWS), blocks, decoded,
                                                 rows.begin > 0, to, with_lines(ahead));
#endif
        choose_integer_vectors(layout, count)(layout, *parts, blocks, to, with_lines(ahead));
      });
    });
  }

#endif

#ifdef HAS_MATRICES

  void multiply_grouped(Span panels, const CGrouping& grouping) const {
    const int64_t vectors = code_bytes(grouping) / CODE_VECTOR;
    with_matrix_decoder(grouping, [&](const auto& decoder) {
      DecodedSteps steps;
      visit_blocks(panels, grouping, [&](int64_t panel, BlockSpan blocks, bool last, Prefetch prefetch, float* sums) {
        BlockReader reader(decoder, blocks, steps);
        visit_tiles(panel, last, blocks.count * vectors, prefetch, sums, [&](Span rows, float* to, auto ahead) {
          const int64_t count = rows.end - rows.begin;
          if (rows.begin > 0) reader.mark_decoded();  // by the first tile
          auto add = count > MATRIX_ROWS ? add_blocks<true, std::decay_t<decltype(decoder)>>
                                         : add_blocks<false, std::decay_t<decltype(decoder)>>;
          add(reader, {x + rows.begin, count}, count, num_pairs, blocks, to, with_lines(ahead));
          if (last) transpose_sums(to, count);
        });
      });
    });
  }

#else

  void multiply_grouped(Span panels, const CGrouping& grouping) const {
    const int64_t vectors = code_bytes(grouping) / CODE_VECTOR;
    const float* input_sums[MAX_ROWS] = {};
    if (grouping.has_offsets) sum_inputs(grouping, input_sums);
    with_decoder(grouping, [&](const auto& decoder) {
      visit_blocks(panels, grouping, [&](int64_t panel, BlockSpan groups, bool last, Prefetch prefetch, float* sums) {
        DecodedGroups decoded = reserve_groups(grouping, groups.count);
        visit_tiles(panel, last, groups.count * vectors, prefetch, sums, [&](Span rows, float* to, auto ahead) {
          decoded.are_decoded = rows.begin > 0;  // by the first tile
          choose_grouped_tile<std::decay_t<decltype(decoder)>>(rows.end - rows.begin, is_interleaved())(
              decoder, x + rows.begin, groups, input_sums + rows.begin, to, decoded, with_lines(ahead));
        });
      });
    });
  }

  DecodedGroups reserve_groups(const CGrouping& grouping, int64_t count) const {
    if (!DECODES_TO_MEMORY) return {};
    const int64_t stride = grouping.size * PANEL, kept = num_tiles == 1 ? 1 : count;
    auto memory = BlockMemory::reserve(block_memory().decoded, divide_up(kept * stride * int64_t(sizeof(Bf16)), 64));
    return {reinterpret_cast<Bf16*>(memory), num_tiles == 1 ? 0 : stride, false};
  }

  void sum_inputs(const CGrouping& grouping, const float** input_sums) const {
    int64_t groups = product.k / grouping.size;
    float* sums = BlockMemory::reserve(block_memory().input_sums, num_rows * groups);
    for (int64_t row = 0; row < num_rows; row++, sums += groups) {
      sum_groups(grouping, product.x + source_of(row) * product.x_stride, product.k, sums);
      input_sums[row] = sums;
    }
  }

#endif

  void finish(int64_t panel, Span rows, const float* sums) const {
    if (is_gated(product.epilogue)) finish_gated(panel, rows, sums);
    else if (product.epilogue == EPILOGUE_ROUND) finish_sums<T>(panel, rows, sums);
    else finish_sums<float>(panel, rows, sums);
  }

  template <class Out>
  void finish_sums(int64_t panel, Span rows, const float* sums) const {
    int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, product.n - first);
    float bias[PANEL] = {};
    if (product.bias) std::copy_n(product.bias + first, count, bias);
    const bool adds = product.epilogue == EPILOGUE_ADD;
    const int64_t stride = product.y_stride;
    Out* y = reinterpret_cast<Out*>(results(rows.begin, panel));
    auto finish_row = [=, &bias](const float* from, Out* to) {
      for (int i = 0; i < PANEL; i += LANES) {
        Floats result = load(from + i) + load(bias + i);
        store(to + i, adds ? load(to + i) + result : result);
      }
    };
    if (count == PANEL) {
      for (int64_t row = rows.begin; row < rows.end; row++, sums += PANEL, y += stride) finish_row(sums, y);
      return;
    }
    for (int64_t row = rows.begin; row < rows.end; row++, sums += PANEL, y += stride) {
      Out edge[PANEL] = {};
      if (adds) std::copy_n(y, count, edge);
      finish_row(sums, edge);
      std::copy_n(edge, count, y);
    }
  }

  void finish_gated(int64_t panel, Span rows, const float* sums) const {
    int64_t inner = product.n / 2, first = panel * LANES, count = std::min<int64_t>(LANES, inner - first);
    float gate_bias[LANES] = {}, up_bias[LANES] = {};
    if (product.bias) {
      std::copy_n(product.bias + first, count, gate_bias);
      std::copy_n(product.bias + inner + first, count, up_bias);
    }
    for (int64_t row = rows.begin; row < rows.end; row++, sums += PANEL) {
      T edge[LANES], *y = reinterpret_cast<T*>(results(row, panel));
      Floats gate = load(sums) + load(gate_bias), up = load(sums + LANES) + load(up_bias);
      store(count == LANES ? y : edge, apply_gate(product.epilogue, product.swiglu, gate, up));
      if (count < LANES) std::copy_n(edge, count, y);
    }
  }
};

// ---- the division among shards

// The units of work of a product: a unit is a block of rows and a panel.
template <class T>
struct Partition {
  int64_t panels, blocks;

  Partition(const Product<T>& product, int num_shards)
      : panels(is_gated(product.epilogue) ? divide_up(product.n / 2, LANES) : divide_up(product.n, PANEL)) {
    int64_t tiles = divide_up(product.num_rows, TILE_ROWS<T>);
    int64_t for_shards = divide_up(2 * num_shards, std::max<int64_t>(panels, 1));
    blocks = std::min(tiles, std::max(divide_up(tiles, BLOCK_TILES), for_shards));
  }

  Span rows(const Product<T>& product, int64_t block) const {
    return range_of({int(block), int(blocks)}, product.num_rows, ROW_GRAIN<T>);
  }
};

// The number of rows that take as long as reading the weight.
template <class T>
constexpr int64_t ROWS_PER_READ = BY_MATRIX<T> ? 64 : 16;

// The cost of a unit, in operations on a pair of k.
template <class T>
int64_t cost(const Product<T>& product, Span rows) {
  return divide_up(product.k, PAIR<T>) * std::max<int64_t>(rows.end - rows.begin, ROWS_PER_READ<T>);
}

// ---- packing

// Pack a lane's pairs [begin, end) of a panel. row: [k], or null for zeros.
template <class T>
void pack_lane(const T* row, int64_t k, Span pairs, T* lane) {
  auto write = [&](int64_t pair, uint32_t word) { std::memcpy(lane + pair * PANEL * PAIR<T>, &word, sizeof word); };
  int64_t pair = pairs.begin, whole = row ? std::min(pairs.end, k / PAIR<T>) : pair;
  for (; pair < whole; pair++) write(pair, read<uint32_t>(row + pair * PAIR<T>));
  for (; pair < pairs.end; pair++) {
    uint32_t word = 0;
    if (row) std::memcpy(&word, row + pair * PAIR<T>, sizeof(T));  // half a pair
    write(pair, word);
  }
}

// Copy to memory that is not read soon, past the caches: a weight is larger, and lines are not read to be overwritten.
inline void copy_past_caches(const void* from, size_t size, void* to) {
#if defined(__x86_64__)
  if (size % 16 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    auto source = static_cast<const char*>(from);
    auto target = static_cast<char*>(to);
    for (size_t at = 0; at < size; at += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + at), read<__m128i>(source + at));
    return;
  }
#endif
  std::memcpy(to, from, size);
}

// Order the copies past the caches before what this thread does next.
inline void finish_copies() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Pack panels of the rows that row_of(panel, lane) returns.
template <class T, class RowOf>
void pack_panels(Span panels, int64_t k, T* out, RowOf&& row_of) {
  constexpr int64_t STEP = 32;  // pairs: two lines of each row, few enough to be fetched ahead of their use
  int64_t pairs = divide_up(k, PAIR<T>), whole = k / PAIR<T>;
  alignas(64) T part[STEP * PANEL * PAIR<T>];
  for (int64_t panel = panels.begin; panel < panels.end; panel++) {
    const T* rows[PANEL];
    for (int lane = 0; lane < PANEL; lane++) rows[lane] = row_of(panel, lane);
    T* to = out + panel * pairs * PANEL * PAIR<T>;
    int64_t pair = 0;
    if (std::find(rows, rows + PANEL, nullptr) == rows + PANEL) {
      for (; pair + STEP <= whole; pair += STEP) {
        const T* from[PANEL];
        for (int lane = 0; lane < PANEL; lane++) {
          from[lane] = rows[lane] + pair * PAIR<T>;
          for (int64_t line = STEP; line < 2 * STEP; line += LANES) __builtin_prefetch(from[lane] + line * PAIR<T>);
        }
        interleave(from, PANEL, STEP, part);
        copy_past_caches(part, sizeof part, to + pair * PANEL * PAIR<T>);
      }
    }
    if (pair == pairs) continue;
    for (int lane = 0; lane < PANEL; lane++) pack_lane(rows[lane], k, {pair, pairs}, to + lane * PAIR<T>);
  }
  finish_copies();
}

}  // namespace

void release_matrices() {
#ifdef HAS_MATRICES
  MatrixRegisters::release();
#endif
}

template <class T>
int64_t packed_size(int64_t n, int64_t k) {
  return round_up(n, PANEL) * round_up(k, PAIR<T>);
}

template <class T>
void pack(const Shard& shard, const T* weight, int64_t stride, int64_t n, int64_t k, T* out) {
  pack_panels(range_of(shard, divide_up(n, PANEL)), k, out, [=](int64_t panel, int lane) {
    int64_t row = panel * PANEL + lane;
    return row < n ? weight + row * stride : nullptr;
  });
}

template <class T>
void pack_gate_up(const Shard& shard, const T* gate, const T* up, int64_t stride, int64_t inner, int64_t k, T* out) {
  pack_panels(range_of(shard, divide_up(inner, LANES)), k, out, [=](int64_t panel, int lane) {
    int64_t row = panel * LANES + lane % LANES;
    return row < inner ? (lane < LANES ? gate : up) + row * stride : nullptr;
  });
}

template <class T, class Out>
void unpack_row(const T* packed, int64_t row, int64_t k, Out* out) {
  const T* from = packed + (row / PANEL * divide_up(k, PAIR<T>) * PANEL + row % PANEL) * PAIR<T>;
  for (int64_t i = 0; i < k; i++) {
    T value = from[i / PAIR<T> * PANEL * PAIR<T> + i % PAIR<T>];
    if constexpr (std::is_same_v<T, Out>) out[i] = value;
    else out[i] = to_float(value);
  }
}

template <class T>
void multiply_all(const Shard& shard, const Product<T>* products, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) {
    Partition<T> partition(products[i], shard.count);
    for (int64_t block = 0; block < partition.blocks; block++)
      total += partition.panels * cost(products[i], partition.rows(products[i], block));
  }

  // Laid end to end, the units of all products have the length `total`. Each shard has an equal range of it, and
  // computes the units that begin there.
  int64_t at = 0, begin = total * shard.index / shard.count, end = total * (shard.index + 1) / shard.count;
  for (int64_t i = 0; i < count && at < end; i++) {
    Partition<T> partition(products[i], shard.count);
    for (int64_t block = 0; block < partition.blocks; block++) {
      Span rows = partition.rows(products[i], block);
      int64_t unit = cost(products[i], rows);
      auto units_before = [&](int64_t position) {
        return std::min(divide_up(std::max<int64_t>(position - at, 0), unit), partition.panels);
      };
      Span panels{units_before(begin), units_before(end)};
      if (panels.begin < panels.end) Block<T>(products[i], rows).multiply(panels);
      at += partition.panels * unit;
    }
  }
}

template <class T>
void multiply(const Shard& shard, const Product<T>& product) {
  multiply_all(shard, &product, 1);
}

template int64_t packed_size<float>(int64_t, int64_t);
template int64_t packed_size<Bf16>(int64_t, int64_t);
template void pack(const Shard&, const float*, int64_t, int64_t, int64_t, float*);
template void pack(const Shard&, const Bf16*, int64_t, int64_t, int64_t, Bf16*);
template void pack_gate_up(const Shard&, const float*, const float*, int64_t, int64_t, int64_t, float*);
template void pack_gate_up(const Shard&, const Bf16*, const Bf16*, int64_t, int64_t, int64_t, Bf16*);
template void unpack_row(const float*, int64_t, int64_t, float*);
template void unpack_row(const Bf16*, int64_t, int64_t, float*);
template void unpack_row(const Bf16*, int64_t, int64_t, Bf16*);
template void multiply(const Shard&, const Product<float>&);
template void multiply(const Shard&, const Product<Bf16>&);
template void multiply_all(const Shard&, const Product<float>*, int64_t);
template void multiply_all(const Shard&, const Product<Bf16>*, int64_t);

}  // namespace eagleray

using namespace eagleray;

extern "C" {

int64_t er_packed_size(int64_t n, int64_t k, int dtype) {
  return dtype == 0 ? packed_size<float>(n, k) : packed_size<Bf16>(n, k);
}

void er_pack(const void* weight, int64_t stride, int64_t n, int64_t k, void* out, int dtype, int num_threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    run_phase(num_threads, [&](Shard shard) {
      pack(shard, static_cast<const T*>(weight), stride, n, k, static_cast<T*>(out));
    });
  });
}

void er_pack_gate_up(const void* gate, const void* up, int64_t stride, int64_t inner, int64_t k, void* out, int dtype,
                     int num_threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    run_phase(num_threads, [&](Shard shard) {
      pack_gate_up(shard, static_cast<const T*>(gate), static_cast<const T*>(up), stride, inner, k,
                   static_cast<T*>(out));
    });
  });
}

void er_unpack_row(const void* packed, int64_t row, int64_t k, void* out, int dtype, int as_float) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (as_float) unpack_row(static_cast<const T*>(packed), row, k, static_cast<float*>(out));
    else unpack_row(static_cast<const T*>(packed), row, k, static_cast<T*>(out));
  });
}

void er_multiply(const CProduct* products, int64_t count, int dtype, int num_threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    std::vector<Product<T>> typed;
    for (int64_t i = 0; i < count; i++) {
      const CProduct& each = products[i];
      typed.push_back({static_cast<const T*>(each.x), each.x_stride, each.x_rows, each.num_rows,
                       static_cast<const T*>(each.weight), each.n, each.k, each.bias, each.epilogue, each.swiglu,
                       each.y, each.y_stride, each.grouping});
    }
    run_phase(num_threads, [&](Shard shard) { multiply_all(shard, typed.data(), count); });
  });
}

}  // extern "C"

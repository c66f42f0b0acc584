// How a product is computed.
//
// What a tile reads must come from the second-level cache in time. So a block is made to fit there: up to 8 tiles of
// rows, and as much of k as leaves room for two panels. While one panel is multiplied, the next is fetched, a part
// during each tile. The rows of a large block are brought into the order in which tiles read them, once for all its
// panels.
#include "product.h"

#include <algorithm>
#include <vector>

#include "product_tile.h"

namespace eagleray {
namespace {

// ---- blocks

constexpr int BLOCK_TILES = 8;
constexpr int FEW_TILES = 2;         // whose rows stay where they are
constexpr int BLOCK_PAIRS = 1024;    // of k, where there are several tiles: 4 KB of a row, 128 KB of a panel
constexpr int BLOCK_PANELS = 4;      // for which the rows' block of k stays, if k has several
constexpr int STREAM_AHEAD = 12288;  // bytes, where a panel is read once

int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

// This thread's memory for the rows of a block. It stays, and grows to what the largest block needs.
uint32_t* memory_of_rows(int64_t words) {
  static thread_local std::vector<uint32_t> memory;
  if (int64_t(memory.size()) < words) memory.resize(words);
  return memory.data();
}

// Some rows of a product.
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
    for (int64_t row = 0; row < num_rows; row++) {
      int64_t source = product.x_rows ? product.x_rows[begin + row] : begin + row;
      x[row] = product.x + source * product.x_stride;
    }
    if (are_arranged()) arrange_tiles();
  }

  // Panel after panel; if k is long, one part of it after the other for a few panels, whose sums wait in between.
  void multiply(Span panels) const {
    alignas(64) float sums[BLOCK_PANELS][MAX_ROWS * PANEL];
    int64_t parts = num_tiles == 1 ? 1 : divide_up(num_pairs, BLOCK_PAIRS), step = parts == 1 ? 1 : BLOCK_PANELS;
    for (int64_t first = panels.begin; first < panels.end; first += step) {
      int64_t last = std::min(first + step, panels.end);
      for (int64_t part = 0; part < parts; part++) {
        Span pairs{num_pairs * part / parts, num_pairs * (part + 1) / parts};
        for (int64_t panel = first; panel < last; panel++) {
          const T* next = nullptr;
          if (panel + 1 < last) next = weight(panel + 1, pairs.begin);
          else if (part + 1 < parts) next = weight(first, pairs.end);
          else if (last < panels.end) next = weight(last, 0);
          multiply_panel(panel, pairs, next, sums[panel - first]);
        }
      }
    }
  }

 private:
  const Product<T>& product;
  int64_t begin, num_rows, num_tiles, num_pairs;
  const T* x[MAX_ROWS];  // if they are arranged: at the first row of each tile, all of it

  Span rows_of(int64_t tile) const { return {num_rows * tile / num_tiles, num_rows * (tile + 1) / num_tiles}; }
  bool are_arranged() const { return num_tiles > FEW_TILES; }

  void arrange_tiles() {
    constexpr int64_t SLOT = arranged(TILE_ROWS<T>);
    T* to = reinterpret_cast<T*>(memory_of_rows(num_tiles * SLOT * num_pairs));
    for (int64_t tile = 0; tile < num_tiles; tile++, to += SLOT * num_pairs * PAIR<T>) {
      Span rows = rows_of(tile);
      arrange(x + rows.begin, rows.end - rows.begin, num_pairs, to);
      x[rows.begin] = to;
    }
  }

  const T* weight(int64_t panel, int64_t pair) const {
    return product.weight + (panel * num_pairs + pair) * PANEL * PAIR<T>;
  }

  // Where the results of a row and a panel go.
  char* results(int64_t row, int64_t panel) const {
    bool gated = is_gated(product.ending);
    int64_t offset = (begin + row) * product.y_stride + panel * (gated ? LANES : PANEL);
    return static_cast<char*>(product.y) + offset * int64_t(gated ? sizeof(T) : sizeof(float));
  }

  // sums: [num_rows, PANEL]. The tiles share the work of fetching `next`.
  void multiply_panel(int64_t panel, Span pairs, const T* next, float* sums) const {
    const T* from = weight(panel, pairs.begin);
    bool last = pairs.end == num_pairs;
    int64_t count = pairs.end - pairs.begin, pace = next ? divide_up(128, num_tiles) : 0;
    Ahead ahead{reinterpret_cast<const char*>(next ? next : from), pace};
    if (num_tiles == 1) ahead = {reinterpret_cast<const char*>(from) + STREAM_AHEAD, 128};

    for (int64_t tile = 0; tile < num_tiles; tile++, ahead.from += pace * count) {
      Span rows = rows_of(tile);
      float* to = sums + rows.begin * PANEL;
      for (int64_t row = rows.begin; last && row < rows.end; row++) {
        __builtin_prefetch(results(row, panel), 1);
        __builtin_prefetch(results(row, panel) + 64, 1);
      }
      choose_tile<T>(rows.end - rows.begin, are_arranged())(x + rows.begin, pairs.begin * PAIR<T>, from, count, to,
                                                            pairs.begin > 0, ahead);
      if (last && is_gated(product.ending)) finish_gated(panel, rows, to);
      else if (last) finish_sums(panel, rows, to);
    }
  }

  void finish_sums(int64_t panel, Span rows, const float* sums) const {
    int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, product.n - first);
    float bias[PANEL] = {}, edge[PANEL] = {};
    if (product.bias) std::copy_n(product.bias + first, count, bias);
    for (int64_t row = rows.begin; row < rows.end; row++, sums += PANEL) {
      float* y = reinterpret_cast<float*>(results(row, panel));
      float* to = count == PANEL ? y : edge;
      if (to != y && product.ending == ENDING_ADD) std::copy_n(y, count, edge);
      for (int i = 0; i < PANEL; i += LANES) {
        Floats result = load(sums + i) + load(bias + i);
        store(to + i, product.ending == ENDING_ADD ? load(to + i) + result : result);
      }
      if (to != y) std::copy_n(edge, count, y);
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
      store(count == LANES ? y : edge, pass(gate, up));
      if (count < LANES) std::copy_n(edge, count, y);
    }
  }

  Floats pass(Floats gate, Floats up) const {
    if (product.ending == ENDING_SILU) return silu(gate) * up;
    const Floats limit = splat(product.swiglu.limit), alpha = splat(product.swiglu.alpha);
    gate = gate > limit ? limit : gate;  // not `min`: NaN must stay
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.0f + exp(-max(alpha * gate, splat(-87.0f)))) * (up + 1.0f);
  }
};

// ---- the division among threads

// How a product is cut: a unit of work is a block of rows and a panel.
template <class T>
struct Cut {
  int64_t panels, blocks;

  Cut(const Product<T>& product, int threads)
      : panels(is_gated(product.ending) ? divide_up(product.n / 2, LANES) : divide_up(product.n, PANEL)) {
    int64_t tiles = divide_up(product.num_rows, TILE_ROWS<T>);
    int64_t for_threads = divide_up(2 * threads, std::max<int64_t>(panels, 1));
    blocks = std::min(tiles, std::max(divide_up(tiles, BLOCK_TILES), for_threads));
  }

  Span rows(const Product<T>& product, int64_t block) const {
    return {product.num_rows * block / blocks, product.num_rows * (block + 1) / blocks};
  }
};

// What a unit takes, in operations on a pair of k. Few rows take as long as reading the weight.
template <class T>
int64_t cost(const Product<T>& product, Span rows) {
  return divide_up(product.k, PAIR<T>) * std::max<int64_t>(rows.end - rows.begin, 16);
}

// ---- packing

// A lane's pairs [begin, end) of a panel. row: [k], or null for zeros.
template <class T>
void pack_lane(const T* row, int64_t k, Span pairs, T* lane) {
  auto put = [&](int64_t pair, uint32_t word) { std::memcpy(lane + pair * PANEL * PAIR<T>, &word, sizeof word); };
  int64_t pair = pairs.begin, whole = row ? std::min(pairs.end, k / PAIR<T>) : pair;
  for (; pair < whole; pair++) put(pair, read<uint32_t>(row + pair * PAIR<T>));
  for (; pair < pairs.end; pair++) {
    uint32_t word = 0;
    if (row) std::memcpy(&word, row + pair * PAIR<T>, sizeof(T));  // half a pair
    put(pair, word);
  }
}

// Panels of the rows that `row_of(panel, lane)` finds.
template <class T, class RowOf>
void pack_panels(Span panels, int64_t k, T* out, RowOf&& row_of) {
  constexpr int64_t STEP = 64;  // pairs, few enough for the panel's part to stay in the first-level cache
  int64_t pairs = divide_up(k, PAIR<T>);
  for (int64_t panel = panels.begin; panel < panels.end; panel++)
    for (int64_t begin = 0; begin < pairs; begin += STEP)
      for (int lane = 0; lane < PANEL; lane++)
        pack_lane(row_of(panel, lane), k, {begin, std::min(begin + STEP, pairs)},
                  out + (panel * pairs * PANEL + lane) * PAIR<T>);
}

}  // namespace

template <class T>
int64_t packed_size(int64_t n, int64_t k) {
  return round_up(n, PANEL) * round_up(k, PAIR<T>);
}

template <class T>
void pack(const Team& team, const T* weight, int64_t stride, int64_t n, int64_t k, T* out) {
  pack_panels(share(team, divide_up(n, PANEL)), k, out, [=](int64_t panel, int lane) {
    int64_t row = panel * PANEL + lane;
    return row < n ? weight + row * stride : nullptr;
  });
}

template <class T>
void pack_gate_up(const Team& team, const T* gate, const T* up, int64_t stride, int64_t inner, int64_t k, T* out) {
  pack_panels(share(team, divide_up(inner, LANES)), k, out, [=](int64_t panel, int lane) {
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
void multiply_all(const Team& team, const Product<T>* products, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) {
    Cut<T> cut(products[i], team.size);
    for (int64_t block = 0; block < cut.blocks; block++)
      total += cut.panels * cost(products[i], cut.rows(products[i], block));
  }

  // Units that begin in [begin, end) of the line of all are this thread's.
  int64_t at = 0, begin = total * team.rank / team.size, end = total * (team.rank + 1) / team.size;
  for (int64_t i = 0; i < count && at < end; i++) {
    Cut<T> cut(products[i], team.size);
    for (int64_t block = 0; block < cut.blocks; block++) {
      Span rows = cut.rows(products[i], block);
      int64_t unit = cost(products[i], rows);
      auto units_before = [&](int64_t place) {
        return std::min(divide_up(std::max<int64_t>(place - at, 0), unit), cut.panels);
      };
      Span panels{units_before(begin), units_before(end)};
      if (panels.begin < panels.end) Block<T>(products[i], rows).multiply(panels);
      at += cut.panels * unit;
    }
  }
}

template <class T>
void multiply(const Team& team, const Product<T>& product) {
  multiply_all(team, &product, 1);
}

template int64_t packed_size<float>(int64_t, int64_t);
template int64_t packed_size<Bf16>(int64_t, int64_t);
template void pack(const Team&, const float*, int64_t, int64_t, int64_t, float*);
template void pack(const Team&, const Bf16*, int64_t, int64_t, int64_t, Bf16*);
template void pack_gate_up(const Team&, const float*, const float*, int64_t, int64_t, int64_t, float*);
template void pack_gate_up(const Team&, const Bf16*, const Bf16*, int64_t, int64_t, int64_t, Bf16*);
template void unpack_row(const float*, int64_t, int64_t, float*);
template void unpack_row(const Bf16*, int64_t, int64_t, float*);
template void unpack_row(const Bf16*, int64_t, int64_t, Bf16*);
template void multiply(const Team&, const Product<float>&);
template void multiply(const Team&, const Product<Bf16>&);
template void multiply_all(const Team&, const Product<float>*, int64_t);
template void multiply_all(const Team&, const Product<Bf16>*, int64_t);

}  // namespace eagleray

// ---- for tests, benchmarks and loading. dtype: 0 float, 1 bfloat16.

using namespace eagleray;

extern "C" {

int64_t er_packed_size(int64_t n, int64_t k, int dtype) {
  return dtype == 0 ? packed_size<float>(n, k) : packed_size<Bf16>(n, k);
}

void er_pack(const void* weight, int64_t stride, int64_t n, int64_t k, void* out, int dtype, int num_threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    run_team(num_threads, [&](Team team) {
      pack(team, static_cast<const T*>(weight), stride, n, k, static_cast<T*>(out));
    });
  });
}

void er_pack_gate_up(const void* gate, const void* up, int64_t stride, int64_t inner, int64_t k, void* out, int dtype,
                     int num_threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    run_team(num_threads, [&](Team team) {
      pack_gate_up(team, static_cast<const T*>(gate), static_cast<const T*>(up), stride, inner, k,
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
                       static_cast<const T*>(each.weight), each.n, each.k, each.bias, each.ending, each.swiglu, each.y,
                       each.y_stride});
    }
    run_team(num_threads, [&](Team team) { multiply_all(team, typed.data(), count); });
  });
}

}  // extern "C"

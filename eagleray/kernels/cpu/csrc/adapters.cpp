#include "adapters.h"

#include <algorithm>

namespace eagleray {
namespace {

constexpr int ROW_BLOCK = 8;         // most rows of A that are stored together
constexpr int DOT_TOKENS = 2;        // tokens that a tile of A x computes
constexpr int EXPAND_TOKENS = 4;     // tokens that a tile of B (A x) computes
constexpr int64_t UNIT_TOKENS = 64;  // most tokens of a unit of work of A x

template <int VALUE>
using Constant = std::integral_constant<int, VALUE>;

int64_t inner_size(const CAdapterSite& site) { return site.num_layers * site.max_rank; }

// ---- A x

// The last lanes of x, where k ends, with zeros behind them.
template <class T>
Pairs<T> load_last(const T* x, int64_t count) {
  T lanes[LANES * PAIR<T>] = {};
  std::copy_n(x, count, lanes);
  return load_pairs(lanes);
}

// Some rows of A and some tokens of its adapter.
template <class T>
struct Unit {
  const T* a;       // [a_stride / 16 / PAIR][num_rows][16 * PAIR]
  int num_rows;     // 8, 4, 2 or 1
  float scale;
  Span tokens;      // of batch.adapter_tokens
  int64_t at;       // of the first row in a token's entry of `inner`

  int64_t cost() const { return num_rows * std::max<int64_t>(tokens.end - tokens.begin, DOT_TOKENS); }
};

// out[token][row] = scale * the dot product of x[token] and row `row` of a. Prefetches as much from `next` as it reads.
template <class T, int ROWS, int TOKENS>
void dot_tile(const T* a, const T* const* x, int64_t k, float scale, float* const* out, const T* next) {
  constexpr int64_t STEP = LANES * PAIR<T>;
  Floats sums[ROWS][TOKENS] = {};
  auto add = [&](const Pairs<T>* values) {
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++, a += STEP, next += STEP) {
      __builtin_prefetch(next);
      Pairs<T> weights = load_pairs(a);
#pragma GCC unroll 16
      for (int token = 0; token < TOKENS; token++) sums[row][token] = dot(sums[row][token], weights, values[token]);
    }
  };
  int64_t i = 0;
  Pairs<T> values[TOKENS];
  for (; i + STEP <= k; i += STEP) {
#pragma GCC unroll 16
    for (int token = 0; token < TOKENS; token++) values[token] = load_pairs(x[token] + i);
    add(values);
  }
  if (i < k) {
    for (int token = 0; token < TOKENS; token++) values[token] = load_last(x[token] + i, k - i);
    add(values);
  }
  for (int row = 0; row < ROWS; row++)
    for (int token = 0; token < TOKENS; token++) out[token][row] = scale * sum(sums[row][token]);
}

// The products of a unit. `next` is prefetched.
template <class T>
void compute_unit(const AdaptedRows<T>& rows, const Unit<T>& unit, const T* x, int64_t x_stride, const T* next) {
  auto tile = [&](int64_t token, auto num_rows, auto num_tokens) {
    const T* from[num_tokens()];
    float* out[num_tokens()];
    for (int i = 0; i < num_tokens(); i++) {
      from[i] = x + rows.batch.adapter_tokens[token + i] * x_stride;
      out[i] = rows.inner + (token + i) * inner_size(rows.site) + unit.at;
    }
    dot_tile<T, num_rows(), num_tokens()>(unit.a, from, rows.site.k, unit.scale, out, next);
  };
  auto tiles = [&](auto num_rows) {
    int64_t token = unit.tokens.begin;
    for (; token + DOT_TOKENS <= unit.tokens.end; token += DOT_TOKENS) tile(token, num_rows, Constant<DOT_TOKENS>{});
    for (; token < unit.tokens.end; token++) tile(token, num_rows, Constant<1>{});
  };
  switch (unit.num_rows) {
    case 8: return tiles(Constant<8>{});
    case 4: return tiles(Constant<4>{});
    case 2: return tiles(Constant<2>{});
    default: return tiles(Constant<1>{});
  }
}

// Call visit(unit) for all units of a batch, in the order in which A is stored.
template <class T, class Visit>
void for_units(const AdaptedRows<T>& rows, Visit&& visit) {
  const CAdapterSite& site = rows.site;
  for (int64_t i = 0; i < rows.batch.num_adapter_groups; i++)
    for (int64_t layer = 0; layer < site.num_layers; layer++) {
      int64_t slot = rows.batch.adapter_slots[i], entry = slot * site.num_layers + layer, rank = site.ranks[entry];
      const T* a = static_cast<const T*>(site.a) + entry * site.max_rank * site.a_stride;
      for (int64_t row = 0; row < rank;) {
        int num_rows = ROW_BLOCK;
        while (row + num_rows > rank) num_rows /= 2;
        Span all{rows.batch.adapter_offsets[i], rows.batch.adapter_offsets[i + 1]};
        for (int64_t token = all.begin; token < all.end; token += UNIT_TOKENS)
          visit(Unit<T>{a + row * site.a_stride, num_rows, site.scales[entry],
                        {token, std::min(token + UNIT_TOKENS, all.end)}, layer * site.max_rank + row});
        row += num_rows;
      }
    }
}

// ---- B (A x)

inline Floats part_of(Pairs<float> pair, int) { return pair.values; }
inline Floats part_of(Pairs<Bf16> pair, int part) {
  Words words = part ? pair.words & 0xffff0000u : pair.words << 16;
  Floats values;
  std::memcpy(&values, &words, sizeof values);
  return values;
}

// Add the sum over the rank of inner[token][j] * b[j] to sums[tokens[token]], for VECTORS * 16 outputs.
// b: [VECTORS][pairs][16]; sums: rows of PANEL
template <class T, int VECTORS, int TOKENS>
inline void expand_tile(const T* b, int64_t rank, const float* inner, int64_t inner_stride, const int32_t* tokens,
                        float* sums) {
  int64_t pairs = divide_up(rank, PAIR<T>);
  Floats total[VECTORS][TOKENS];
#pragma GCC unroll 16
  for (int vector = 0; vector < VECTORS; vector++)
#pragma GCC unroll 16
    for (int token = 0; token < TOKENS; token++)
      total[vector][token] = load(sums + tokens[token] * int64_t(PANEL) + vector * LANES);
  auto add = [&](const T* at, const float* factors, auto parts) {
#pragma GCC unroll 16
    for (int vector = 0; vector < VECTORS; vector++) {
      Pairs<T> weights = load_pairs(at + vector * pairs * LANES * PAIR<T>);
#pragma GCC unroll 16
      for (int part = 0; part < parts(); part++) {
        Floats values = part_of(weights, part);
#pragma GCC unroll 16
        for (int token = 0; token < TOKENS; token++)
          total[vector][token] += values * factors[token * inner_stride + part];
      }
    }
  };
  for (int64_t j = 0; j + PAIR<T> <= rank; j += PAIR<T>, b += LANES * PAIR<T>) add(b, inner + j, Constant<PAIR<T>>{});
  if (rank % PAIR<T>) add(b, inner + rank - 1, Constant<1>{});
#pragma GCC unroll 16
  for (int vector = 0; vector < VECTORS; vector++)
#pragma GCC unroll 16
    for (int token = 0; token < TOKENS; token++)
      store(sums + tokens[token] * int64_t(PANEL) + vector * LANES, total[vector][token]);
}

template <class T, int VECTORS>
void expand_tokens(const T* b, const AdapterPiece<T>& piece, float* sums) {
  int64_t token = 0;
  for (; token + EXPAND_TOKENS <= piece.num_tokens; token += EXPAND_TOKENS)
    expand_tile<T, VECTORS, EXPAND_TOKENS>(b, piece.rank, piece.inner + token * piece.inner_stride, piece.inner_stride,
                                           piece.tokens + token, sums);
  for (; token < piece.num_tokens; token++)
    expand_tile<T, VECTORS, 1>(b, piece.rank, piece.inner + token * piece.inner_stride, piece.inner_stride,
                               piece.tokens + token, sums);
}

// The same for a vector that has lanes from `column` on, which is no multiple of 16. Other panels have the others.
template <class T>
void expand_across(const T* b, const AdapterPiece<T>& piece, int64_t column, float* sums) {
  for (int64_t token = 0; token < piece.num_tokens; token++) {
    float results[LANES] = {};
    int32_t row = 0;
    expand_tile<T, 1, 1>(b, piece.rank, piece.inner + token * piece.inner_stride, piece.inner_stride, &row, results);
    for (int64_t lane = std::max<int64_t>(-column, 0); lane < std::min<int64_t>(LANES, PANEL - column); lane++)
      sums[piece.tokens[token] * PANEL + column + lane] += results[lane];
  }
}

}  // namespace

int64_t adapter_scratch_size(const CMultiply& args, int64_t num_tokens) {
  return num_tokens * inner_size(*args.adapters);
}

template <class T>
AdaptedRows<T>::AdaptedRows(const CMultiply& args, const CBatch& batch)
    : site(*args.adapters), batch(batch), is_gated(eagleray::is_gated(args.epilogue)), inner(batch.adapter_scratch) {}

template <class T>
bool AdaptedRows<T>::is_empty() const {
  auto has_factors = [&](int32_t slot) {
    const int32_t* ranks = site.ranks + slot * site.num_layers;
    return std::any_of(ranks, ranks + site.num_layers, [](int32_t rank) { return rank > 0; });
  };
  return std::none_of(batch.adapter_slots, batch.adapter_slots + batch.num_adapter_groups, has_factors);
}

template <class T>
void shrink(const Shard& shard, const AdaptedRows<T>& rows, const T* x, int64_t x_stride) {
  int64_t total = 0;
  for_units(rows, [&](const Unit<T>& unit) { total += unit.cost(); });

  // Laid end to end, the units have the length `total`. Each shard has an equal range of it, and computes the units
  // that begin there. Each unit prefetches the next one.
  int64_t at = 0, begin = total * shard.index / shard.count, end = total * (shard.index + 1) / shard.count;
  Unit<T> pending{};
  for_units(rows, [&](const Unit<T>& unit) {
    if (begin <= at && at < end) {
      if (pending.a) compute_unit(rows, pending, x, x_stride, unit.a);
      pending = unit;
    }
    at += unit.cost();
  });
  if (pending.a) compute_unit(rows, pending, x, x_stride, pending.a);
}

template <class T>
AdaptedBlock<T>::AdaptedBlock(const AdaptedRows<T>& rows, Span block) : rows(rows), begin(block.begin) {
  const CAdapterSite& site = rows.site;
  const CBatch& batch = rows.batch;
  int64_t b_start = 0;
  for (int64_t layer = 0; layer < site.num_layers; layer++) {
    for (int64_t i = 0; i < batch.num_adapter_groups; i++) {
      int64_t slot = batch.adapter_slots[i], rank = site.ranks[slot * site.num_layers + layer];
      const int32_t *all = batch.adapter_tokens, *last = all + batch.adapter_offsets[i + 1];
      const int32_t* first = std::lower_bound(all + batch.adapter_offsets[i], last, block.begin);  // they ascend
      int64_t count = std::lower_bound(first, last, block.end) - first;
      if (rank == 0 || count == 0) continue;
      const T* b = static_cast<const T*>(site.b) + slot * site.b_stride + b_start * round_up(site.max_rank, PAIR<T>);
      const float* inner = rows.inner + (first - all) * inner_size(site) + layer * site.max_rank;
      pieces.push_back({layer, b, rank, LANES * round_up(rank, PAIR<T>), inner, inner_size(site), first, count});
    }
    b_start += round_up(site.sizes[layer], LANES);
  }
}

// Call visit(piece, vectors, column) for each piece in a panel: `vectors` of its layer are in the panel, and the first
// begins at `column`, which is negative if it begins before the panel.
template <class T>
template <class Visit>
void AdaptedBlock<T>::for_pieces(int64_t panel, Visit&& visit) const {
  int64_t start = 0;  // of the layer
  auto piece = pieces.begin();
  for (int64_t layer = 0; layer < rows.site.num_layers; start += rows.site.sizes[layer++]) {
    Span vectors{panel, panel + 1};
    int64_t column = layer * LANES;
    if (!rows.is_gated) {
      int64_t first = panel * PANEL - start, last = std::min(first + PANEL, rows.site.sizes[layer]);  // of the layer
      vectors = {std::max<int64_t>(first, 0) / LANES, divide_up(std::max<int64_t>(last, 0), LANES)};
      column = vectors.begin * LANES - first;
    }
    for (; piece != pieces.end() && piece->layer == layer; ++piece)
      if (vectors.begin < vectors.end) visit(*piece, vectors, column);
  }
}

template <class T>
void AdaptedBlock<T>::list_factors(int64_t panel, LineList& lines) const {
  for_pieces(panel, [&](const AdapterPiece<T>& piece, Span vectors, int64_t) {
    int64_t size = (vectors.end - vectors.begin) * piece.vector_stride * int64_t(sizeof(T));
    lines.add(piece.b + vectors.begin * piece.vector_stride, size);
  });
}

template <class T>
void AdaptedBlock<T>::expand(int64_t panel, float* sums) const {
  sums -= begin * PANEL;
  for_pieces(panel, [&](const AdapterPiece<T>& piece, Span vectors, int64_t column) {
    const T* b = piece.b + vectors.begin * piece.vector_stride;
    int64_t count = vectors.end - vectors.begin;
    if (column % LANES == 0) {
      if (count == 2) expand_tokens<T, 2>(b, piece, sums + column);
      else expand_tokens<T, 1>(b, piece, sums + column);
      return;
    }
    for (int64_t i = 0; i < count; i++) expand_across(b + i * piece.vector_stride, piece, column + i * LANES, sums);
  });
}

template struct AdaptedRows<float>;
template struct AdaptedRows<Bf16>;
template class AdaptedBlock<float>;
template class AdaptedBlock<Bf16>;
template void shrink(const Shard&, const AdaptedRows<float>&, const float*, int64_t);
template void shrink(const Shard&, const AdaptedRows<Bf16>&, const Bf16*, int64_t);

}  // namespace eagleray

extern "C" int64_t er_adapter_scratch_size(const CMultiply* args, int64_t num_tokens) {
  return int64_t(sizeof(float)) * eagleray::adapter_scratch_size(*args, num_tokens);
}

#include "adapters.h"

#include <algorithm>

#include "rows.h"

namespace eagleray {
namespace {

constexpr int64_t PREFETCH_BYTES = 2048;  // distance where a factor is read once
constexpr int TILE = 4;  // tokens, and rows of A or vectors of B, that a tile computes

int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

int64_t inner_size(const CAdapterSite& site) { return site.num_layers * site.max_rank; }

// The results of a gated product before the gate: 16 of gate and the corresponding 16 of up in turn, as it is packed.
int64_t gated_size(const CMultiply& args) { return 2 * round_up(args.n / 2, LANES); }

// The tokens of one adapter, and its factors in one layer.
template <class T>
struct Group {
  const T* a;  // [rank, a_stride]
  const T* b;  // [outputs / 16, rank, 16]
  int64_t rank;
  float scale;
  Span tokens;  // of batch.adapter_tokens

  Group(const AdaptedRows<T>& rows, int64_t group, int64_t layer, int64_t b_start) {
    const CAdapterSite& site = rows.site;
    int64_t slot = rows.batch.adapter_slots[group], entry = slot * site.num_layers + layer;
    a = static_cast<const T*>(site.a) + entry * site.max_rank * site.a_stride;
    b = static_cast<const T*>(site.b) + slot * site.b_stride + b_start * site.max_rank;
    rank = site.ranks[entry];
    scale = site.scales[entry];
    tokens = {rows.batch.adapter_offsets[group], rows.batch.adapter_offsets[group + 1]};
  }
};

// The last lanes of x, where k ends, with zeros behind them.
template <class T>
Pairs<T> load_last(const T* x, int64_t count) {
  T lanes[LANES * PAIR<T>] = {};
  std::copy_n(x, count, lanes);
  return load_pairs(lanes);
}

// out[token][row] = scale * the dot product of x[token] and row `row` of a.
template <class T, int ROWS, int TOKENS>
void dot_tile(const T* a, int64_t a_stride, const T* const* x, int64_t k, float scale, float* const* out) {
  constexpr int64_t STEP = LANES * PAIR<T>;
  Floats sums[ROWS][TOKENS] = {};
  auto add = [&](int64_t i, const Pairs<T>* values) {
    for (int row = 0; row < ROWS; row++) {
      if (TOKENS == 1) __builtin_prefetch(a + row * a_stride + i + PREFETCH_BYTES / 4 / int64_t(sizeof(T)));
      Pairs<T> weights = load_pairs(a + row * a_stride + i);
      for (int token = 0; token < TOKENS; token++) sums[row][token] = dot(sums[row][token], weights, values[token]);
    }
  };
  int64_t i = 0;
  Pairs<T> values[TOKENS];
  for (; i + STEP <= k; i += STEP) {
    for (int token = 0; token < TOKENS; token++) values[token] = load_pairs(x[token] + i);
    add(i, values);
  }
  if (i < k) {
    for (int token = 0; token < TOKENS; token++) values[token] = load_last(x[token] + i, k - i);
    add(i, values);
  }
  for (int row = 0; row < ROWS; row++)
    for (int token = 0; token < TOKENS; token++) out[token][row] = scale * sum(sums[row][token]);
}

// The products of a group's tokens with these rows of A.
template <class T>
void shrink_rows(const AdaptedRows<T>& rows, const Group<T>& group, int64_t layer, Span span, const T* x,
                 int64_t x_stride) {
  const CAdapterSite& site = rows.site;
  auto tile = [&](int64_t row, int64_t token, auto num_rows, auto num_tokens) {
    const T* from[num_tokens()];
    float* out[num_tokens()];
    for (int i = 0; i < num_tokens(); i++) {
      from[i] = x + rows.batch.adapter_tokens[token + i] * x_stride;
      out[i] = rows.inner + (token + i) * inner_size(site) + layer * site.max_rank + row;
    }
    dot_tile<T, num_rows(), num_tokens()>(group.a + row * site.a_stride, site.a_stride, from, site.k, group.scale, out);
  };
  std::integral_constant<int, TILE> many;
  std::integral_constant<int, 1> one;
  for (int64_t row = span.begin; row < span.end;) {
    bool many_rows = row + TILE <= span.end;
    for (int64_t token = group.tokens.begin; token < group.tokens.end;) {
      bool many_tokens = token + TILE <= group.tokens.end;
      if (many_rows && many_tokens) tile(row, token, many, many);
      else if (many_rows) tile(row, token, many, one);
      else if (many_tokens) tile(row, token, one, many);
      else tile(row, token, one, one);
      token += many_tokens ? TILE : 1;
    }
    row += many_rows ? TILE : 1;
  }
}

// sums[token] = the sum over the rank of inner[token][j] * b[j], for VECTORS * 16 outputs.
template <class T, int VECTORS, int TOKENS>
inline void sum_tile(const T* b, int64_t rank, const float* const* inner, Floats (&out)[VECTORS][TOKENS]) {
  Floats sums[VECTORS][TOKENS] = {};
  const char* ahead = reinterpret_cast<const char*>(b) + PREFETCH_BYTES;
  for (int64_t j = 0; j < rank; j++, b += LANES) {
    if (TOKENS == 1)
      for (size_t i = 0; i < VECTORS * LANES * sizeof(T); i += 64)
        __builtin_prefetch(ahead + size_t(j) * VECTORS * LANES * sizeof(T) + i);
    for (int vector = 0; vector < VECTORS; vector++) {
      Floats weights = load(b + vector * rank * LANES);
      for (int token = 0; token < TOKENS; token++) sums[vector][token] += splat(inner[token][j]) * weights;
    }
  }
  std::memcpy(out, sums, sizeof sums);
}

// Add the vectors `span` of a layer's outputs. The results of vector i begin at y_start + i * y_step; the layer has
// `size` outputs, all of whose vectors have room if `is_padded`.
template <class T>
void expand_vectors(const AdaptedRows<T>& rows, const Group<T>& group, int64_t layer, Span span, int64_t y_start,
                    int64_t y_step, bool is_padded) {
  const CAdapterSite& site = rows.site;
  int64_t size = site.sizes[layer];
  auto tile = [&](int64_t vector, int64_t token, auto num_vectors, auto num_tokens) {
    const float* inner[num_tokens()];
    for (int i = 0; i < num_tokens(); i++)
      inner[i] = rows.inner + (token + i) * inner_size(site) + layer * site.max_rank;
    Floats sums[num_vectors()][num_tokens()];
    sum_tile<T, num_vectors(), num_tokens()>(group.b + vector * group.rank * LANES, group.rank, inner, sums);
    for (int i = 0; i < num_vectors(); i++)
      for (int row = 0; row < num_tokens(); row++) {
        float* y = rows.y + rows.batch.adapter_tokens[token + row] * rows.y_stride + y_start + (vector + i) * y_step;
        int64_t count = is_padded ? LANES : std::min<int64_t>(LANES, size - (vector + i) * LANES);
        if (count == LANES) store(y, load(y) + sums[i][row]);
        else store_some(y, load_some(y, count) + sums[i][row], count);
      }
  };
  std::integral_constant<int, TILE> many;
  std::integral_constant<int, 1> one;
  for (int64_t vector = span.begin; vector < span.end;) {
    bool many_vectors = vector + TILE <= span.end;
    for (int64_t token = group.tokens.begin; token < group.tokens.end;) {
      bool many_tokens = token + TILE <= group.tokens.end;
      if (many_vectors && many_tokens) tile(vector, token, many, many);
      else if (many_vectors) tile(vector, token, many, one);
      else if (many_tokens) tile(vector, token, one, many);
      else tile(vector, token, one, one);
      token += many_tokens ? TILE : 1;
    }
    vector += many_vectors ? TILE : 1;
  }
}

}  // namespace

int64_t adapter_scratch_size(const CMultiply& args, int64_t num_tokens) {
  int64_t before_gate = is_gated(args.epilogue) ? num_tokens * gated_size(args) : 0;
  return round_up(num_tokens * inner_size(*args.adapters), LANES) + before_gate;
}

template <class T>
AdaptedRows<T>::AdaptedRows(const CMultiply& args, const CBatch& batch, int64_t num_tokens, void* out,
                            int64_t out_stride)
    : args(args),
      site(*args.adapters),
      batch(batch),
      num_tokens(num_tokens),
      inner(batch.adapter_scratch),
      y(static_cast<float*>(out)),
      y_stride(out_stride) {
  if (is_gated(args.epilogue)) {
    y = inner + round_up(num_tokens * inner_size(site), LANES);
    y_stride = gated_size(args);
  }
}

template <class T>
void shrink(const Shard& shard, const AdaptedRows<T>& rows, const T* x, int64_t x_stride) {
  const CAdapterSite& site = rows.site;
  int64_t num_groups = rows.batch.num_adapter_groups;
  auto visit = [&](auto&& work) {  // the groups of all layers, with the cost of a row of A
    for (int64_t i = 0; i < num_groups; i++)
      for (int64_t layer = 0; layer < site.num_layers; layer++) {
        Group<T> group(rows, i, layer, 0);
        work(group, layer, std::max<int64_t>(group.tokens.end - group.tokens.begin, TILE));
      }
  };
  int64_t total = 0;
  visit([&](const Group<T>& group, int64_t, int64_t cost) { total += group.rank * cost; });

  // The rows of all groups in order are a line of length `total`. The shard computes those that begin in its range.
  int64_t at = 0, begin = total * shard.index / shard.count, end = total * (shard.index + 1) / shard.count;
  visit([&](const Group<T>& group, int64_t layer, int64_t cost) {
    auto before = [&](int64_t position) {
      return std::min(divide_up(std::max<int64_t>(position - at, 0), cost), group.rank);
    };
    shrink_rows(rows, group, layer, {before(begin), before(end)}, x, x_stride);
    at += group.rank * cost;
  });
}

template <class T>
void expand(const Shard& shard, const AdaptedRows<T>& rows) {
  const CAdapterSite& site = rows.site;
  int64_t total = 0;
  for (int64_t layer = 0; layer < site.num_layers; layer++) total += divide_up(site.sizes[layer], LANES);
  Span own = range_of(shard, total);
  int64_t first = 0, y_start = 0;  // the layer's first vector and output
  for (int64_t layer = 0; layer < site.num_layers; layer++) {
    int64_t count = divide_up(site.sizes[layer], LANES);
    Span span{std::clamp<int64_t>(own.begin - first, 0, count), std::clamp<int64_t>(own.end - first, 0, count)};
    for (int64_t i = 0; i < rows.batch.num_adapter_groups; i++) {
      Group<T> group(rows, i, layer, first * LANES);
      if (group.rank) expand_vectors(rows, group, layer, span, y_start, LANES, false);
    }
    first += count;
    y_start += site.sizes[layer];
  }
}

template <class T>
void expand_and_gate(const Shard& shard, const AdaptedRows<T>& rows, T* out, int64_t out_stride) {
  const CMultiply& args = rows.args;
  int64_t inner = args.n / 2, count = divide_up(inner, LANES);
  Span own = range_of(shard, count);
  for (int64_t layer = 0; layer < 2; layer++)
    for (int64_t i = 0; i < rows.batch.num_adapter_groups; i++) {
      Group<T> group(rows, i, layer, layer * count * LANES);
      if (group.rank) expand_vectors(rows, group, layer, own, layer * LANES, 2 * LANES, true);
    }
  for (int64_t row = 0; row < rows.num_tokens; row++)
    for (int64_t vector = own.begin; vector < own.end; vector++) {
      const float* y = rows.y + row * rows.y_stride + vector * 2 * LANES;
      int64_t first = vector * LANES, size = std::min<int64_t>(LANES, inner - first);
      Floats gate = load(y), up = load(y + LANES);
      if (args.bias) {
        gate += load_some(args.bias + first, size);
        up += load_some(args.bias + inner + first, size);
      }
      Floats result = apply_gate(args.epilogue, args.swiglu, gate, up);
      T* to = out + row * out_stride + first;
      if (size == LANES) store(to, result);
      else store_some(to, result, size);
    }
}

template struct AdaptedRows<float>;
template struct AdaptedRows<Bf16>;
template void shrink(const Shard&, const AdaptedRows<float>&, const float*, int64_t);
template void shrink(const Shard&, const AdaptedRows<Bf16>&, const Bf16*, int64_t);
template void expand(const Shard&, const AdaptedRows<float>&);
template void expand(const Shard&, const AdaptedRows<Bf16>&);
template void expand_and_gate(const Shard&, const AdaptedRows<float>&, float*, int64_t);
template void expand_and_gate(const Shard&, const AdaptedRows<Bf16>&, Bf16*, int64_t);

}  // namespace eagleray

extern "C" int64_t er_adapter_scratch_size(const CMultiply* args, int64_t num_tokens) {
  return int64_t(sizeof(float)) * eagleray::adapter_scratch_size(*args, num_tokens);
}

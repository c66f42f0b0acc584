#include "rows.h"

#include "grouped.h"
#include "product.h"

namespace eagleray {
namespace {

// The sum in a fixed order: four sums of every fourth vector, then (0 + 1) + (2 + 3), then over the lanes.
float sum_of_squares(const float* x, int64_t size) {
  Floats totals[4] = {};
  auto add_square = [](Floats& total, Floats value) { total += value * value; };
  int64_t i = 0;
  for (; i + 4 * LANES <= size; i += 4 * LANES)
    for (int part = 0; part < 4; part++) add_square(totals[part], load(x + i + part * LANES));
  for (int part = 0; i < size; i += LANES, part++)
    add_square(totals[part], load_some(x + i, size - i < LANES ? size - i : LANES));
  return sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
}

template <class T>
void normalize_row(const float* x, int64_t size, const float* weight, float eps, T* out) {
  Floats scale = splat(1.0f / std::sqrt(sum_of_squares(x, size) / float(size) + eps));
  for_vectors(size, [&](int64_t i, auto count) {
    store_some(out + i, load_some(x + i, count) * scale * load_some(weight + i, count), count);
  });
}

template <class T>
void embed_row(const EmbeddingTable<T>& table, int64_t row, float* out) {
  if (table.grouping) return unpack_grouped_row(*table.grouping, table.values, row, table.size, out);
  if (table.is_packed) return unpack_row(table.values, row, table.size, out);
  const T* from = table.values + row * table.size;
  for (int64_t i = 0; i < table.size; i++) out[i] = to_float(from[i]);
}

}  // namespace

template <class T>
void normalize(const Shard& shard, const float* x, int64_t stride, int64_t num_rows, int64_t size, const float* weight,
               float eps, T* out, int64_t out_stride) {
  Span own = range_of(shard, num_rows);
  for (int64_t row = own.begin; row < own.end; row++)
    normalize_row(x + row * stride, size, weight, eps, out + row * out_stride);
}

template <class T>
void embed(const Shard& shard, const EmbeddingTable<T>& table, const int32_t* token_ids, int64_t num_rows, float* out) {
  Span own = range_of(shard, num_rows);
  for (int64_t i = own.begin; i < own.end; i++) {
    int64_t row = token_ids[i] - table.first;
    float* to = out + i * table.size;
    if (row < 0 || row >= table.num_own) std::memset(to, 0, size_t(table.size) * sizeof(float));
    else embed_row(table, row, to);
  }
}

void add(const Shard& shard, const float* x, int64_t stride, int64_t num_rows, int64_t size, float* out,
         int64_t out_stride) {
  Span own = range_of(shard, num_rows);
  for (int64_t row = own.begin; row < own.end; row++)
    for (int64_t i = 0; i < size; i++) out[row * out_stride + i] += x[row * stride + i];
}

template <class T>
void round(const Shard& shard, const float* x, int64_t stride, int64_t num_rows, int64_t size, T* out,
           int64_t out_stride) {
  Span own = range_of(shard, num_rows);
  for (int64_t row = own.begin; row < own.end; row++)
    for_vectors(size, [&](int64_t i, auto count) {
      store_some(out + row * out_stride + i, load_some(x + row * stride + i, count), count);
    });
}

template void normalize(const Shard&, const float*, int64_t, int64_t, int64_t, const float*, float, float*, int64_t);
template void normalize(const Shard&, const float*, int64_t, int64_t, int64_t, const float*, float, Bf16*, int64_t);
template void round(const Shard&, const float*, int64_t, int64_t, int64_t, float*, int64_t);
template void round(const Shard&, const float*, int64_t, int64_t, int64_t, Bf16*, int64_t);
template void embed(const Shard&, const EmbeddingTable<float>&, const int32_t*, int64_t, float*);
template void embed(const Shard&, const EmbeddingTable<Bf16>&, const int32_t*, int64_t, float*);

}  // namespace eagleray

using namespace eagleray;

extern "C" {

void er_normalize(const float* x, int64_t stride, int64_t num_rows, int64_t size, const float* weight,
                  float eps, void* out, int64_t out_stride, int dtype, int num_threads) {
  with_type(dtype, [&](auto zero) {
    auto* to = static_cast<decltype(zero)*>(out);
    run_phase(num_threads,
              [&](Shard shard) { normalize(shard, x, stride, num_rows, size, weight, eps, to, out_stride); });
  });
}

void er_embed(const void* values, int is_packed, const CGrouping* grouping, int64_t size, int64_t first, int64_t num_own,
              const int32_t* token_ids, int64_t num_rows, float* out, int dtype, int num_threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    EmbeddingTable<T> table{static_cast<const T*>(values), bool(is_packed), grouping, size, first, num_own};
    run_phase(num_threads, [&](Shard shard) { embed(shard, table, token_ids, num_rows, out); });
  });
}

void er_add(const float* x, int64_t stride, int64_t num_rows, int64_t size, float* out, int64_t out_stride,
            int num_threads) {
  run_phase(num_threads, [&](Shard shard) { add(shard, x, stride, num_rows, size, out, out_stride); });
}

}  // extern "C"

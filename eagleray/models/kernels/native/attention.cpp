#include "attention.h"

#include <algorithm>
#include <vector>

namespace eagleray {
namespace {

constexpr int SLICES = 16;             // of a chunk; a slice is 16 lanes of a block
constexpr int CHUNK = SLICES * LANES;  // lanes that share a softmax
constexpr int TILE = 48;               // rows computed together; a row is the query of one token and head
constexpr int FEW = 24;                // with so few rows memory is what takes the time
constexpr int WIDTH = MAX_HEAD_DIM + LANES;  // of a row's result: features, then 16 sums of its probabilities
constexpr float NONE = -1e30f;               // the top score where there is none: below every score, and finite

// Results that are held in registers: rows x vectors.
#ifdef __AVX512F__
constexpr int MAX_ROWS = 6, VECTORS = 4;
#else  // 16 registers, each half a vector or a quarter
constexpr int MAX_ROWS = 2, VECTORS = 2;
#endif
// Slices that are read together, in all products: so many pages a processor fetches well at a time.
constexpr int TOGETHER = 4;

template <int N>
using Count = std::integral_constant<int, N>;

// ---- queries, keys and values of a token

// x / rms(x) * weight, then rotated, in place.
__attribute__((noinline)) void norm_and_rotate(float* x, int64_t size, const float* weight, float eps, const float* cos,
                                               const float* sin) {
  if (weight) {
    Floats squares = {};
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    float scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    for (int64_t i = 0; i < size; i++) x[i] = x[i] * scale * weight[i];
  }
  int64_t half = size / 2;
  for (int64_t i = 0; i < half; i++) {
    float first = x[i], second = x[half + i];
    x[i] = first * cos[i] - second * sin[i];
    x[half + i] = second * cos[i] + first * sin[i];
  }
}

template <class T>
struct Head {
  alignas(64) float values[MAX_HEAD_DIM];
  alignas(64) T rounded[MAX_HEAD_DIM];
  int64_t size;

  explicit Head(int64_t size) : size(size) { std::memset(values, 0, sizeof values); }

  void read(const float* from) { std::memcpy(values, from, size * sizeof(float)); }
  void round() {
    for (int64_t i = 0; i < size; i += LANES) store(rounded + i, load(values + i));
  }
};

template <class T>
void write_key(const Head<T>& key, int64_t lanes, T* keys, int64_t lane) {
  for (int64_t i = 0; i < key.size; i += PAIR<T>)
    std::memcpy(keys + i * lanes + lane * PAIR<T>, key.rounded + i, PAIR<T> * sizeof(T));
}

template <class T>
void write_value(const Head<T>& value, T* values, int64_t lane) {
  T* to = values + lane / PAIR<T> * value.size * PAIR<T> + lane % PAIR<T>;
  for (int64_t i = 0; i < value.size; i++) to[i * PAIR<T>] = value.rounded[i];
}

// ---- products of some rows. AHEAD: also fetch what is needed a chunk later.

template <int M, int N>
inline void clear(Floats (&totals)[M][N]) {
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) totals[m][n] = Floats{};
}

// scores[M][N slices] = queries[M] . keys[N]; a step leads from a pair of features to the next one.
template <class T, int M, int N, bool AHEAD>
__attribute__((noinline)) void multiply_keys(const T* queries, const T* const* keys, const T* const* ahead, int64_t step,
                                             int64_t size, float* scores) {
  Floats totals[M][N];
  clear(totals);
  const T *at[N], *fetch[N];
  for (int n = 0; n < N; n++) at[n] = keys[n], fetch[n] = ahead[n];
  int64_t i = 0, offset = 0;
  do {
    Pairs<T> b[N];
    for (int n = 0; n < N; n++) b[n] = load_pairs(at[n] + offset);
    if (AHEAD)
      for (int n = 0; n < N; n++) __builtin_prefetch(fetch[n] + offset);
    for (int m = 0; m < M; m++) {
      Pairs<T> a = splat_pair(queries + m * MAX_HEAD_DIM + i);
      for (int n = 0; n < N; n++) totals[m][n] = dot(totals[m][n], a, b[n]);
    }
    i += PAIR<T>, offset += step;
  } while (i < size);
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) store(scores + m * CHUNK + n * LANES, totals[m][n]);
}

// Call f(slice, lane, offset of its pair): the order in which values are added up.
template <class T, class F>
inline void for_values(Span slices, int64_t step, F&& f) {
  for (int64_t first = slices.begin / TOGETHER * TOGETHER; first < slices.end; first += TOGETHER) {
    const int64_t begin = std::max(first, slices.begin), end = std::min(first + TOGETHER, slices.end);
    int64_t offset = 0;
    for (int64_t lane = 0; lane < LANES; lane += PAIR<T>, offset += step)
      for (int64_t slice = begin; slice < end; slice++) f(slice, lane, offset);
  }
}

// out[M][N vectors] = probabilities[M] . values of these slices. A step leads from a pair of tokens to the next one.
template <class T, int M, int N, bool AHEAD>
__attribute__((noinline)) void multiply_values(const T* probabilities, const T* const* values, const T* const* ahead,
                                               Span slices, int64_t step, int64_t feature, float* out) {
  Floats totals[M][N];
  clear(totals);
  for_values<T>(slices, step, [&](int64_t slice, int64_t lane, int64_t offset) __attribute__((always_inline)) {
    offset += feature * PAIR<T>;
    Pairs<T> b[N];
    for (int n = 0; n < N; n++) b[n] = load_pairs(values[slice] + offset + n * LANES * PAIR<T>);
    if (AHEAD)
      for (int n = 0; n < N; n++) __builtin_prefetch(ahead[slice] + offset + n * LANES * PAIR<T>);
    for (int m = 0; m < M; m++) {
      Pairs<T> a = splat_pair(probabilities + m * CHUNK + slice * LANES + lane);
      for (int n = 0; n < N; n++) totals[m][n] = dot(totals[m][n], a, b[n]);
    }
  });
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) store(out + m * WIDTH + feature + n * LANES, totals[m][n]);
}

// The same for one row, and the features behind the last full vector.
template <class T>
void multiply_rest(const T* probabilities, const T* const* values, Span slices, int64_t step, int64_t feature,
                   float* out) {
  Floats total = {};
  for_values<T>(slices, step, [&](int64_t slice, int64_t lane, int64_t offset) {
    T rest[LANES * PAIR<T>] = {};
    std::memcpy((void*)rest, values[slice] + offset + feature * PAIR<T>, (step - feature * PAIR<T>) * sizeof(T));
    total = dot(total, splat_pair(probabilities + slice * LANES + lane), load_pairs(rest));
  });
  store(out + feature, total);
}

// Call f(row, Count<how many>) until all rows are covered; it may run over the end by one.
template <class F>
void for_rows(int64_t begin, int64_t end, F&& f) {
  for (; end - begin >= std::max(MAX_ROWS - 1, 3) || end - begin == MAX_ROWS; begin += MAX_ROWS) f(begin, Count<MAX_ROWS>());
  if (end - begin == 4) f(begin, Count<2>()), begin += 2;
  if (end - begin == 3) f(begin, Count<3>()), begin += 3;
  if (end - begin == 2) f(begin, Count<2>()), begin += 2;
  if (end - begin == 1) f(begin, Count<1>());
}

// ---- softmax

inline Floats exp2_of(Floats x, float) { return exp2(x); }
inline Floats exp2_of(Floats x, Bf16) {
#ifdef __AVX512DQ__
  // 2^(x - floor(x)) * 2^floor(x), to 3e-6 relative: far below what rounding to bfloat16 costs
  Floats rest = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
  Floats p = splat(1.353416803e-2f);
  p = p * rest + 5.201146141e-2f;
  p = p * rest + 2.414427556e-1f;
  p = p * rest + 6.930038350e-1f;
  p = p * rest + 1.000002593f;
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  return exp2(x);
#endif
}

inline float top_of(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  return highest(x);
#endif
}

// 16 lanes of a block.
template <class T>
struct Slice {
  int64_t position;  // of the first token
  int64_t tokens;    // fewer than 16 at the end of a block of an odd size
  const T* keys;
  const T* values;
};

template <class T>
struct Chunk {
  int64_t begin, end;  // its slices that some row of the tile sees
  Slice<T> slices[SLICES];
};

template <class T>
inline Floats hide(Floats scores, const Slice<T>& slice, Span seen) {
  const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int64_t begin = std::max<int64_t>(seen.begin - slice.position, 0);
  int64_t end = std::max<int64_t>(std::min(seen.end - slice.position, slice.tokens), 0);
  if (begin == 0 && end == LANES) return scores;
  Ints shown = (lanes >= Ints{} + int32_t(begin)) & (lanes < Ints{} + int32_t(end));
  return shown ? scores : splat(-INFINITY);
}

// Scores of a row to probabilities, relative to their top, which is returned; those that it does not see become 0.
// ALL: it sees every lane.
template <bool ALL, class T>
__attribute__((noinline)) float soften(const Chunk<T>& chunk, Span seen, float scale, const float* scores,
                                       T* probabilities, float* sums) {
  const int64_t from = ALL ? 0 : chunk.begin, to = ALL ? SLICES : chunk.end;
  Floats x[SLICES], best = splat(NONE);
  for (int64_t i = from; i < to; i++) {
    x[i] = load(scores + i * LANES);
    if (!ALL) x[i] = hide(x[i], chunk.slices[i], seen);
    best = max(x[i], best);
  }
  const float top = top_of(best) * scale;
  Floats total = {};
  for (int64_t i = from; i < to; i++) {
    Floats p = exp2_of(x[i] * scale - top, T{});
    total += p;
    store(probabilities + i * LANES, p);
  }
  store(sums, total);
  return top;
}

// Add the result of a chunk, relative to its top, to that of the chunks before it.
__attribute__((noinline)) void merge(float* total, float* total_top, const float* part, float part_top, int64_t size) {
  const bool higher = part_top > *total_top;
  Floats less = exp2(splat(higher ? *total_top - part_top : part_top - *total_top));
  Floats keep = higher ? less : splat(1.0f), take = higher ? splat(1.0f) : less;
  for (int64_t i = 0; i < size; i += LANES) store(total + i, load(total + i) * keep + load(part + i) * take);
  if (higher) *total_top = part_top;
}

template <class T>
__attribute__((noinline)) void finish(const float* total, const float* sums, int64_t size, T* out) {
  const float share = 1.0f / sum(load(sums));
  for (int64_t i = 0; i < size; i++) out[i] = from_float<T>(total[i] * share);
}

// ---- tasks

// Some rows of a kv head: of a request's queries x heads of the group, in this order.
struct Task {
  int64_t request, kv_head;
  int64_t begin, end;
};

// What a thread computes of a task.
struct Piece {
  Task task;
  Span chunks;
};

template <class T>
struct Workspace {
  alignas(64) T queries[TILE + 1][MAX_HEAD_DIM];  // `for_rows` may run over by one
  alignas(64) float scores[TILE + 2][CHUNK];      // and slices over the end of the last row
  alignas(64) T probabilities[TILE + 1][CHUNK];
  alignas(64) float parts[TILE + 1][WIDTH];
  alignas(64) float totals[TILE][WIDTH];
  alignas(64) T last_values[LANES * MAX_HEAD_DIM];
  float part_tops[TILE], total_tops[TILE];
  Span seen[TILE];
  std::vector<Piece> pieces;
};

template <class T>
struct Attention {
  const Team& team;
  const AttentionShape& shape;
  const Rows& rows;
  const T* queries;
  const T* cache;
  T* out;
  float* scratch;
  Workspace<T>& space;

  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t lanes = lanes_of_block(shape);
  const int64_t per_block = lanes / LANES;
  const int64_t keys_size = lanes * shape.head_dim;  // of a block and kv head; the values' as well
  const int64_t width = round_up(shape.head_dim, LANES);
  const float scale = shape.scale * 1.44269504088896341f;  // for powers of 2

  // -- places

  int64_t slice_of(int64_t position) const {
    return position / shape.block_size * per_block + position % shape.block_size / LANES;
  }
  int64_t chunk_of(int64_t position) const { return slice_of(position) / SLICES; }

  int64_t num_queries(int64_t request) const { return rows.starts[request + 1] - rows.starts[request]; }

  Span seen(const Task& task, int64_t row) const {
    int64_t position = rows.context_lens[task.request] - num_queries(task.request) + row / group;
    return {shape.window ? std::max<int64_t>(position - shape.window + 1, 0) : 0, position + 1};
  }
  Span chunks_of(const Task& task) const {
    return {chunk_of(seen(task, task.begin).begin), chunk_of(seen(task, task.end - 1).end - 1) + 1};
  }
  int64_t offset(const Task& task, int64_t row) const {
    int64_t token = rows.starts[task.request] + row / group, head = task.kv_head * group + row % group;
    return (token * shape.num_heads + head) * shape.head_dim;
  }

  Chunk<T> find(const Task& task, int64_t index) const {
    int64_t begin = std::max(slice_of(seen(task, task.begin).begin), index * SLICES);
    int64_t end = std::min(slice_of(seen(task, task.end - 1).end - 1) + 1, (index + 1) * SLICES);
    Chunk<T> chunk;
    chunk.begin = begin - index * SLICES, chunk.end = end - index * SLICES;
    const int32_t* table = rows.block_table + task.request * rows.table_stride;
    int64_t block = begin / per_block, in_block = begin % per_block;
    for (int64_t i = chunk.begin; i < chunk.end; i++) {
      const T* keys = cache + (table[block] * shape.num_kv_heads + task.kv_head) * 2 * keys_size;
      int64_t first = in_block * LANES, position = block * shape.block_size + first;
      chunk.slices[i] = {position, std::min<int64_t>(shape.block_size - first, LANES), keys + first * PAIR<T>,
                         keys + keys_size + first * shape.head_dim};
      if (++in_block == per_block) in_block = 0, block++;
    }
    return chunk;
  }

  // -- one chunk

  // The first tokens of a slice's values, and zeros for the rest: 0 times what another request left there may be NaN.
  const T* copy_known(const T* values, int64_t tokens) {
    int64_t step = shape.head_dim * PAIR<T>, known = tokens / PAIR<T> * step;
    T* copy = space.last_values;
    std::memcpy((void*)copy, values, known * sizeof(T));
    std::memset((void*)(copy + known), 0, (LANES * shape.head_dim - known) * sizeof(T));
    if (tokens % PAIR<T>)
      for (int64_t i = 0; i < step; i += PAIR<T>) copy[known + i] = values[known + i];
    return copy;
  }

  // Results of a chunk for the rows that see it -> parts, part_tops. `next` is what will be read after it.
  Span compute(const Task& task, Chunk<T>& chunk, const Chunk<T>& next) {
    const Slice<T>& first = chunk.slices[chunk.begin];
    Slice<T>& last = chunk.slices[chunk.end - 1];
    int64_t begin = 0, end = task.end - task.begin, context = rows.context_lens[task.request];
    const bool few = end <= FEW;
    while (space.seen[begin].end <= first.position) begin++;
    while (space.seen[end - 1].begin >= last.position + last.tokens) end--;
    score(chunk, next, {begin, end}, few);
    const bool whole = chunk.end - chunk.begin == SLICES && shape.block_size % LANES == 0;
    for (int64_t row = begin; row < end; row++) {
      Span seen = space.seen[row];
      const bool all = whole && seen.begin <= first.position && seen.end >= last.position + LANES;
      space.part_tops[row] = (all ? soften<true, T> : soften<false, T>)(chunk, seen, scale, space.scores[row],
                                                                        space.probabilities[row], space.parts[row] + width);
    }
    if (last.position + last.tokens > context) last.values = copy_known(last.values, context - last.position);
    weigh(chunk, next, {begin, end}, few);
    return {begin, end};
  }

  void score(const Chunk<T>& chunk, const Chunk<T>& next, Span some, bool few) {
    for (int64_t slice = chunk.begin; slice < chunk.end; slice += VECTORS) {
      const T *keys[VECTORS], *ahead[VECTORS];
      for (int n = 0; n < VECTORS; n++) {
        keys[n] = chunk.slices[std::min(slice + n, chunk.end - 1)].keys;
        ahead[n] = next.slices[std::max(next.begin, std::min(slice + n, next.end - 1))].keys;
      }
      auto multiply = [&](int64_t row, auto count, auto fetch) {
        multiply_keys<T, count(), VECTORS, fetch()>(space.queries[row], keys, ahead, lanes * PAIR<T>, shape.head_dim,
                                                    space.scores[row] + slice * LANES);
      };
      for_rows(some.begin, some.end, [&](int64_t row, auto count) {
        if (space.seen[std::min(row + count(), some.end) - 1].end <= chunk.slices[slice].position) return;
        if constexpr (count() < MAX_ROWS) multiply(row, count, std::true_type());
        else few ? multiply(row, count, std::true_type()) : multiply(row, count, std::false_type());
      });
    }
  }

  void weigh(const Chunk<T>& chunk, const Chunk<T>& next, Span some, bool few) {
    const T *values[SLICES], *ahead[SLICES];
    for (int64_t slice = chunk.begin; slice < chunk.end; slice++) {
      values[slice] = chunk.slices[slice].values;
      ahead[slice] = next.slices[std::max(next.begin, std::min(slice, next.end - 1))].values;
    }
    const int64_t size = shape.head_dim, step = size * PAIR<T>;
    auto multiply = [&](int64_t row, auto count, auto vectors, auto fetch, int64_t feature) {
      constexpr int M = count(), N = vectors();
      Span slices = {chunk.begin, chunk.end};
      while (chunk.slices[slices.begin].position + chunk.slices[slices.begin].tokens <= space.seen[row].begin) slices.begin++;
      while (chunk.slices[slices.end - 1].position >= space.seen[std::min(row + M, some.end) - 1].end) slices.end--;
      multiply_values<T, M, N, fetch()>(space.probabilities[row], values, ahead, slices, step, feature, space.parts[row]);
    };
    int64_t feature = 0;
    auto cover = [&](auto vectors) {
      for (; feature + vectors() * LANES <= size; feature += vectors() * LANES)
        for_rows(some.begin, some.end, [&](int64_t row, auto count) {
          if constexpr (count() < MAX_ROWS) multiply(row, count, vectors, std::true_type(), feature);
          else few ? multiply(row, count, vectors, std::true_type(), feature) : multiply(row, count, vectors, std::false_type(), feature);
        });
    };
    cover(Count<VECTORS>());
    cover(Count<1>());
    if (feature < size)
      for (int64_t row = some.begin; row < some.end; row++)
        multiply_rest(space.probabilities[row], values, {chunk.begin, chunk.end}, step, feature, space.parts[row]);
  }

  // -- one task

  void open(const Task& task) {
    for (int64_t row = 0; row < task.end - task.begin; row++) {
      std::memcpy((void*)space.queries[row], queries + offset(task, task.begin + row), shape.head_dim * sizeof(T));
      space.seen[row] = seen(task, task.begin + row);
      space.total_tops[row] = NONE;
    }
  }

  void add(int64_t row, const float* part, float top) {
    if (space.total_tops[row] == NONE) {
      std::memcpy(space.totals[row], part, (width + LANES) * sizeof(float));
      space.total_tops[row] = top;
    } else {
      merge(space.totals[row], &space.total_tops[row], part, top, width + LANES);
    }
  }

  void close(const Task& task) {
    for (int64_t row = 0; row < task.end - task.begin; row++)
      finish(space.totals[row], space.totals[row] + width, shape.head_dim, out + offset(task, task.begin + row));
  }

  void run(const Piece& piece, const Piece& following) {
    const Task& task = piece.task;
    Span all = chunks_of(task);
    open(task);
    Chunk<T> chunk = find(task, piece.chunks.begin);
    for (int64_t index = piece.chunks.begin; index < piece.chunks.end; index++) {
      Chunk<T> next = index + 1 < piece.chunks.end ? find(task, index + 1) : find(following.task, following.chunks.begin);
      Span done = compute(task, chunk, next);
      for (int64_t row = done.begin; row < done.end; row++) add(row, space.parts[row], space.part_tops[row]);
      chunk = next;
    }
    if (piece.chunks.end == all.end) close(task);
  }

  // -- this thread's share

  int64_t tiles(int64_t request) const { return (num_queries(request) * group + TILE - 1) / TILE; }
  Task task_of(int64_t request, int64_t kv_head, int64_t tile) const {
    return {request, kv_head, tile * TILE, std::min((tile + 1) * TILE, num_queries(request) * group)};
  }
  // Of a chunk: memory is read, and some more is computed with every row.
  int64_t weight(const Task& task) const { return 12 + task.end - task.begin; }
  int64_t cost(const Task& task) const {
    Span chunks = chunks_of(task);
    return (chunks.end - chunks.begin) * weight(task);
  }

  void divide() {
    space.pieces.clear();
    int64_t total = 0, at = 0;
    for (int64_t request = 0; request < rows.num_rows; request++)
      for (int64_t tile = 0; tile < tiles(request); tile++) total += cost(task_of(request, 0, tile)) * shape.num_kv_heads;
    Span own = {total * team.rank / team.size, total * (team.rank + 1) / team.size};
    for (int64_t request = 0; request < rows.num_rows; request++)
      for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; kv_head++)
        for (int64_t tile = 0; tile < tiles(request); tile++) {
          Task task = task_of(request, kv_head, tile);
          if (at >= own.begin && at < own.end) space.pieces.push_back({task, chunks_of(task)});
          at += cost(task);
        }
  }

  void run() {
    divide();
    for (size_t i = 0; i < space.pieces.size(); i++)
      run(space.pieces[i], space.pieces[std::min(i + 1, space.pieces.size() - 1)]);
  }
};

}  // namespace

template <class T>
void prepare(const Team& team, const AttentionShape& shape, const Rows& rows, const float* qkv, const float* q_norm,
             const float* k_norm, float eps, const float* cos, const float* sin, T* queries, T* cache) {
  const int64_t size = shape.head_dim, heads = shape.num_heads, kv_heads = shape.num_kv_heads, group = heads / kv_heads;
  const int64_t lanes = lanes_of_block(shape);
  Head<T> head(size);
  Span own = share(team, rows.num_tokens * kv_heads);
  for (int64_t item = own.begin; item < own.end; item++) {
    int64_t token = item / kv_heads, kv_head = item % kv_heads;
    const float* from = qkv + token * (heads + 2 * kv_heads) * size;
    const float *cosines = cos + rows.positions[token] * (size / 2), *sines = sin + rows.positions[token] * (size / 2);
    for (int64_t i = kv_head * group; i < (kv_head + 1) * group; i++) {
      head.read(from + i * size);
      norm_and_rotate(head.values, size, q_norm, eps, cosines, sines);
      head.round();
      std::memcpy((void*)(queries + (token * heads + i) * size), head.rounded, size * sizeof(T));
    }
    int64_t block = rows.slots[token] / shape.block_size, lane = rows.slots[token] % shape.block_size;
    T* keys = cache + (block * kv_heads + kv_head) * 2 * lanes * size;
    head.read(from + (heads + kv_head) * size);
    norm_and_rotate(head.values, size, k_norm, eps, cosines, sines);
    head.round();
    write_key(head, lanes, keys, lane);
    head.read(from + (heads + kv_heads + kv_head) * size);
    head.round();
    write_value(head, keys + lanes * size, lane);
  }
}

int64_t attend_scratch(const AttentionShape&, int64_t, int) {
  return 0;
}

template <class T>
void attend(const Team& team, const AttentionShape& shape, const Rows& rows, const T* queries, const T* cache, T* out,
            float* scratch) {
  static thread_local Workspace<T> space;
  Attention<T>{team, shape, rows, queries, cache, out, scratch, space}.run();
}

template void prepare(const Team&, const AttentionShape&, const Rows&, const float*, const float*, const float*, float,
                      const float*, const float*, float*, float*);
template void prepare(const Team&, const AttentionShape&, const Rows&, const float*, const float*, const float*, float,
                      const float*, const float*, Bf16*, Bf16*);
template void attend(const Team&, const AttentionShape&, const Rows&, const float*, const float*, float*, float*);
template void attend(const Team&, const AttentionShape&, const Rows&, const Bf16*, const Bf16*, Bf16*, float*);

}  // namespace eagleray

using namespace eagleray;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int64_t er_block_elements(const AttentionShape* shape) { return block_elements(*shape); }
EXPORT int64_t er_attend_scratch(const AttentionShape* shape, int64_t max_context, int num_threads) {
  return attend_scratch(*shape, max_context, num_threads);
}
EXPORT void er_prepare(int dtype, int num_threads, const AttentionShape* shape, const Rows* rows, const float* qkv,
                       const float* q_norm, const float* k_norm, float eps, const float* cos, const float* sin,
                       void* queries, void* cache) {
  run_team(num_threads, [&](const Team& team) {
    if (dtype) prepare(team, *shape, *rows, qkv, q_norm, k_norm, eps, cos, sin, (Bf16*)queries, (Bf16*)cache);
    else prepare(team, *shape, *rows, qkv, q_norm, k_norm, eps, cos, sin, (float*)queries, (float*)cache);
  });
}
EXPORT void er_attend(int dtype, int num_threads, const AttentionShape* shape, const Rows* rows, const void* queries,
                      const void* cache, void* out, float* scratch) {
  run_team(num_threads, [&](const Team& team) {
    if (dtype) attend(team, *shape, *rows, (const Bf16*)queries, (const Bf16*)cache, (Bf16*)out, scratch);
    else attend(team, *shape, *rows, (const float*)queries, (const float*)cache, (float*)out, scratch);
  });
}

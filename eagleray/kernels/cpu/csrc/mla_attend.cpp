// Attention over latents of one shard: its tasks one after another, and each task chunk by chunk of its context.
#include "attention_results.h"
#include "mla.h"
#include "mla_tile.h"

namespace eagleray {
namespace {

constexpr float LOG2_E = 1.44269504088896341f;
constexpr int64_t CHUNK_TOKENS = CHUNK_LANES;

// The attention over latents as one with a single head of keys. Its tasks and chunks are those of a cache whose blocks
// are whole slices, because here any positions can be cut apart.
CAttentionParams as_attention(const CMLAParams& params) {
  return {params.num_heads, 1, params.rank, LANES, 0, params.scale, nullptr, CACHE_PLAIN};
}

// Memory that grows to what is needed, from a cache line on.
template <class Number>
class GrowingMemory {
 public:
  Number* reserve(int64_t count) {
    const int64_t size = (count * int64_t(sizeof(Number)) + CACHE_LINE - 1) / CACHE_LINE;
    if (int64_t(lines_.size()) < size) lines_.resize(size_t(size));
    return reinterpret_cast<Number*>(lines_.data());
  }

 private:
  struct alignas(CACHE_LINE) Line {
    char bytes[CACHE_LINE];
  };
  std::vector<Line> lines_;
};

// Memory of one thread. `for_rows` may exceed a tile by one row, and a group of cached vectors the end of a chunk.
template <class T>
class Workspace {
 public:
  const T* tokens[CHUNK_TOKENS];  // cached vectors of the chunk, in order of position
  T *queries, *probabilities, *values;
  float *scores, *parts, *totals;
  float part_sum[TILE], part_max[TILE], total_max[TILE];
  int64_t step;  // of a row in `parts` and `totals`
  std::vector<Piece> pieces;

  void reserve(const CMLAParams& params) {
    step = round_up(params.rank, VALUE_FEATURES) + LANES;
    queries = queries_.reserve((params.rank + params.rotated_dim) * TILE);
    scores = scores_.reserve((CHUNK_TOKENS + MOST_TOKENS) * TILE);
    probabilities = probabilities_.reserve((CHUNK_TOKENS + 1) * TILE);
    values = values_.reserve(CHUNK_TOKENS * VALUE_FEATURES);
    parts = parts_.reserve((TILE + 1) * step);
    totals = totals_.reserve(TILE * step);
  }

 private:
  GrowingMemory<T> queries_, probabilities_, values_;
  GrowingMemory<float> scores_, parts_, totals_;
};

template <class T>
class LatentAttention : TaskRows {
 public:
  LatentAttention(const CMLAParams& mla, const CAttentionParams& params, const CAttentionMetadata& metadata,
                  const T* prepared, const T* cache, T* latents, const Scratch& scratch, Workspace<T>& space)
      : TaskRows{params, metadata},
        mla_(mla),
        prepared_(prepared),
        cache_(cache),
        latents_(latents),
        space_(space),
        results_{scratch, space.parts, space.totals, space.part_max, space.total_max, space.step, width_ + LANES} {}

  void run(const Piece& piece) {
    const Span all = chunks(piece.task);
    results_.clear(piece.task);
    load_queries(piece.task);
    for (int64_t index = piece.chunks.begin; index < piece.chunks.end; index++)
      results_.take(piece, index, all.begin, compute(piece.task, index));
    if (results_.complete(piece, all)) write_results(piece.task);
  }

 private:
  // The row's number among those of all tokens and heads.
  int64_t number(const Task& task, int64_t row) const {
    return metadata.query_start_loc[task.request] * params.num_heads + task.begin + row;
  }

  // Lay the queries of the task side by side. Rows after the last one repeat it.
  void load_queries(const Task& task) {
    const int64_t size = mla_.plain_dim + mla_.rotated_dim, last = task.end - task.begin - 1;
    const T *absorbed[TILE], *rotated[TILE];
    for (int64_t row = 0; row < TILE; row++) {
      const int64_t n = number(task, std::min(row, last));
      absorbed[row] = latents_ + n * mla_.rank;
      rotated[row] = prepared_ + n * size + mla_.plain_dim;
    }
    interleave(absorbed, TILE, mla_.rank / PAIR<T>, space_.queries);
    interleave(rotated, TILE, mla_.rotated_dim / PAIR<T>, space_.queries + mla_.rank * TILE);
  }

  // Compute a chunk for the rows that see it, and return these rows.
  Span compute(const Task& task, int64_t index) {
    const int64_t first = index * CHUNK_TOKENS, rows = task.end - task.begin;
    const int64_t num_tokens = std::min(CHUNK_TOKENS, visible(task).end - first);
    find_tokens(task, first, num_tokens);
    multiply_queries(space_.tokens, num_tokens, cached_size_, space_.queries, (rows + LANES - 1) / LANES,
                     space_.scores);
    for (int64_t row = 0; row < rows; row += LANES) softmax(task, first, num_tokens, row);
    Span active = {0, rows};
    while (visible(task, task.begin + active.begin).end <= first) active.begin++;
    multiply_values(num_tokens, active);
    return active;
  }

  void find_tokens(const Task& task, int64_t first, int64_t count) {
    const int32_t* table = metadata.block_table + task.request * metadata.table_stride;
    for (int64_t i = 0; i < count;) {
      const int64_t block = (first + i) / mla_.block_size, offset = (first + i) % mla_.block_size;
      const T* from = cache_ + (table[block] * mla_.block_size + offset) * cached_size_;
      for (const int64_t end = std::min(count, i + mla_.block_size - offset); i < end; i++, from += cached_size_)
        space_.tokens[i] = from;
    }
  }

  // The rows are 16 from `first_row` on.
  void softmax(const Task& task, int64_t first, int64_t num_tokens, int64_t first_row) {
    const int64_t last = task.end - task.begin - 1;
    float ends[LANES];
    for (int64_t i = 0; i < LANES; i++)
      ends[i] = float(visible(task, task.begin + std::min(first_row + i, last)).end - first);
    const RowSums sums = softmax_of_rows(space_.scores + first_row, round_up(num_tokens, 4),
                                         std::min<int64_t>(int64_t(ends[0]), num_tokens), load(ends), scale_,
                                         space_.probabilities + first_row * PAIR<T>);
    store(space_.part_max + first_row, sums.highest);
    store(space_.part_sum + first_row, sums.total);
  }

  void multiply_values(int64_t num_tokens, Span active) {
    for (int64_t feature = 0; feature < mla_.rank; feature += VALUE_FEATURES) {
      copy_values(space_.tokens, num_tokens, feature, std::min(VALUE_FEATURES, mla_.rank - feature), space_.values);
      for_rows(active, [&](int64_t row, auto count) {
        sum_values<T, count()>(space_.probabilities + row * PAIR<T>, space_.values, num_tokens,
                               space_.parts + row * space_.step + feature, space_.step);
      });
    }
    for (int64_t row = active.begin; row < active.end; row++)
      store(space_.parts + row * space_.step + width_, Floats{space_.part_sum[row]});
  }

  void write_results(const Task& task) const {
    for (int64_t row = 0; row < task.end - task.begin; row++) {
      const float* total = space_.totals + row * space_.step;
      finish(total, total + width_, 0.0f, mla_.rank, latents_ + number(task, row) * mla_.rank);
    }
  }

  const CMLAParams& mla_;
  const T *prepared_, *cache_;
  T* latents_;
  Workspace<T>& space_;
  const int64_t width_ = round_up(mla_.rank, LANES), cached_size_ = mla_.rank + mla_.rotated_dim;
  const float scale_ = mla_.scale * LOG2_E;  // makes the softmax one of powers of 2
  const Results results_;
};

}  // namespace

int64_t attend_latents_scratch(const CMLAParams& params, int64_t max_context, int num_threads) {
  return attend_scratch(as_attention(params), max_context, num_threads);
}

template <class T>
void attend_latents(const Shard& shard, const CMLAParams& params, const CAttentionMetadata& metadata,
                    const T* prepared, const T* cache, T* latents, float* splits) {
  static thread_local Workspace<T> space;
  space.reserve(params);
  const CAttentionParams attention = as_attention(params);
  Division division(attention, metadata, shard);
  division.collect(space.pieces);
  const Scratch scratch(attention, shard.count, division.max_chunks(), splits);
  LatentAttention<T> run(params, attention, metadata, prepared, cache, latents, scratch, space);
  for (const Piece& piece : space.pieces) run.run(piece);
}

template void attend_latents(const Shard&, const CMLAParams&, const CAttentionMetadata&, const float*, const float*,
                             float*, float*);
template void attend_latents(const Shard&, const CMLAParams&, const CAttentionMetadata&, const Bf16*, const Bf16*,
                             Bf16*, float*);

}  // namespace eagleray

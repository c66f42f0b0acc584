// Attention of one shard: its tasks one after another, and each task chunk by chunk of its context.
#include "attention_results.h"
#include "matrix_attention.h"

namespace eagleray {
namespace {

constexpr float LOG2_E = 1.44269504088896341f;
constexpr int64_t SLICES_AHEAD = 4;  // distance of prefetching

// 16 lanes of a block.
template <class Stored>
struct Slice {
  int64_t position;    // of the first token
  int64_t tokens;      // 16, fewer at the end of a block whose size is no multiple of 16
  const Stored* keys;  // of the block and kv head; the values follow
  int64_t lane;        // of the first token in the block

  int64_t end() const { return position + tokens; }
};

template <class Stored>
struct Chunk {
  Span slices;  // that at least one row of the tile sees
  Slice<Stored> at[CHUNK_SLICES];
  SliceScales scales;  // of a cache that has any

  const Slice<Stored>& first() const { return at[slices.begin]; }
  const Slice<Stored>& last() const { return at[slices.end - 1]; }
};

// Memory of one thread. `for_rows` may exceed the tile by one row, and a group of slices the end of the last row.
template <class Format>
struct Workspace {
  using Stored = typename Format::Stored;
  using Number = typename Format::Number;

  alignas(64) Number queries[TILE + 1][MAX_HEAD_DIM];
  alignas(64) float scores[TILE + 2][CHUNK_LANES];
  alignas(64) Number probabilities[TILE + 1][CHUNK_LANES];
  alignas(64) float parts[TILE + 1][RESULT_SIZE];  // results of one chunk
  alignas(64) float totals[TILE][RESULT_SIZE];     // results of the chunks so far
  float part_max[TILE], total_max[TILE];
  float query_factors[TILE], result_factors[TILE + 1];  // of a cache with scales
  alignas(64) Stored last_values[LANES * MAX_HEAD_DIM];
  Span visible[TILE];  // positions
  Chunk<Stored> chunks[2];
  std::vector<Piece> pieces;
};

template <class T, class Format>
class Attention : TaskRows {
  using Stored = typename Format::Stored;
  using Number = typename Format::Number;
  using Chunk = eagleray::Chunk<Stored>;
  using Slice = eagleray::Slice<Stored>;
  static constexpr int64_t PAIR = eagleray::PAIR<Number>;
  static constexpr bool BY_MATRIX = eagleray::BY_MATRIX<T> && !Format::HAS_SCALES;

 public:
  Attention(const CAttentionParams& params, const CAttentionMetadata& metadata, const T* queries, const Stored* cache,
            T* out, const Scratch& scratch, Workspace<Format>& space)
      : TaskRows{params, metadata}, queries_(queries), cache_(cache), out_(out), space_(space),
        results_{scratch, space.parts[0], space.totals[0], space.part_max, space.total_max, RESULT_SIZE,
                 width_ + LANES} {}

  void run() {
    const std::vector<Piece>& pieces = space_.pieces;
    for (size_t i = 0; i < pieces.size(); i++) run(pieces[i], pieces[std::min(i + 1, pieces.size() - 1)]);
  }

 private:
  void run(const Piece& piece, const Piece& following) {
    const Span all = chunks(piece.task);
    results_.clear(piece.task);
    load_queries(piece.task);
    find_slices(piece.task, piece.chunks.begin, space_.chunks[0]);
    for (int64_t index = piece.chunks.begin, turn = 0; index < piece.chunks.end; index++, turn ^= 1) {
      const Chunk& chunk = space_.chunks[turn];
      Chunk& next = space_.chunks[turn ^ 1];
      if (index + 1 < piece.chunks.end) find_slices(piece.task, index + 1, next);
      else find_slices(following.task, following.chunks.begin, next);
      results_.take(piece, index, all.begin, compute(piece.task, chunk, next));
    }
    if (results_.complete(piece, all)) write_results(piece.task);
  }

  void load_queries(const Task& task) {
    for (int64_t row = 0; row < task.end - task.begin; row++) {
      load_query(queries_ + offset(task, task.begin + row), row);
      space_.visible[row] = visible(task, task.begin + row);
    }
  }

  void load_query(const T* query, int64_t row) {
    if constexpr (Format::HAS_SCALES) {
      alignas(64) float numbers[MAX_HEAD_DIM] = {};
      for (int64_t i = 0; i < size_; i++) numbers[i] = to_float(query[i]);
      space_.query_factors[row] = convert_numbers<Format>(numbers, width_, space_.queries[row]);
    } else {
      std::memcpy((void*)space_.queries[row], query, size_t(size_) * sizeof(T));
    }
  }

  void write_results(const Task& task) {
    for (int64_t row = 0; row < task.end - task.begin; row++)
      finish(space_.totals[row], space_.totals[row] + width_, sink_probability(task, row), size_,
             out_ + offset(task, task.begin + row));
  }

  float sink_probability(const Task& task, int64_t row) const {
    if (!params.sinks) return 0;
    return std::exp2(params.sinks[head(task, task.begin + row)] * LOG2_E - space_.total_max[row]);
  }

  void find_slices(const Task& task, int64_t index, Chunk& chunk) const {
    const Span positions = visible(task);
    const int64_t base = index * CHUNK_SLICES;
    const int64_t begin = std::max(slice_of(params, positions.begin), base);
    const int64_t end = std::min(slice_of(params, positions.end - 1) + 1, base + CHUNK_SLICES);
    const int32_t* table = metadata.block_table + task.request * metadata.table_stride;
    int64_t block = begin / (lanes_ / LANES), lane = begin % (lanes_ / LANES) * LANES;
    chunk.slices = {begin - base, end - base};
    for (int64_t i = begin; i < end; i++) {
      const Stored* keys = cache_ + (table[block] * params.num_kv_heads + task.kv_head) * head_elements(params);
      const int64_t position = block * params.block_size + lane, left = params.block_size - lane;
      chunk.at[i - base] = {position, std::min<int64_t>(left, LANES), keys, lane};
      lane += LANES;
      if (lane == lanes_) lane = 0, block++;
    }
    if constexpr (Format::HAS_SCALES) find_scales(chunk);
  }

  void find_scales(Chunk& chunk) const {
    static const Bf16 none[LANES] = {};
    for (int64_t i = 0; i < CHUNK_SLICES; i++) {
      chunk.scales.keys[i] = chunk.scales.values[i] = none;
      if (i < chunk.slices.begin || i >= chunk.slices.end) continue;
      const Slice& slice = chunk.at[i];
      chunk.scales.keys[i] = reinterpret_cast<const Bf16*>(slice.keys + 2 * values_at_) + slice.lane;
      chunk.scales.values[i] = chunk.scales.keys[i] + lanes_;
      __builtin_prefetch(chunk.scales.keys[i]);
      __builtin_prefetch(chunk.scales.values[i]);
    }
  }

  // Compute a chunk for the rows that see it, and return these rows. `next` is the chunk that is read after it.
  Span compute(const Task& task, const Chunk& chunk, const Chunk& next) {
    Span active = {0, task.end - task.begin};
    while (space_.visible[active.begin].end <= chunk.first().position) active.begin++;
    while (space_.visible[active.end - 1].begin >= chunk.last().end()) active.end--;
    const Stored* order[2 * CHUNK_SLICES + SLICES_AHEAD];  // of reading: this chunk's keys and values, the next's keys
    const int64_t count = chunk.slices.end - chunk.slices.begin;
    for (int64_t i = 0; i < count; i++) {
      order[i] = chunk.at[chunk.slices.begin + i].keys;
      order[count + i] = order[i] + values_at_;
    }
    for (int64_t i = 0; i < SLICES_AHEAD; i++)
      order[2 * count + i] = next.at[std::min(next.slices.begin + i, next.slices.end - 1)].keys;
    multiply_queries(chunk, active, order + SLICES_AHEAD);
    const bool whole = count == CHUNK_SLICES && params.block_size % LANES == 0;
    for (int64_t row = active.begin; row < active.end; row++) {
      const Span visible = space_.visible[row];
      const bool all = whole && visible.begin <= chunk.first().position && visible.end >= chunk.last().end();
      all ? softmax_all(chunk, row) : softmax_visible(chunk, row);
    }
    multiply_probabilities(task, chunk, active, order + count + SLICES_AHEAD);
    return active;
  }

  void multiply_queries(const Chunk& chunk, Span active, const Stored* const* later) {
    if constexpr (BY_MATRIX) {
      if (suits_matrices_) return multiply_queries_by_matrix(chunk, active, later);
    }
    for (int64_t slice = chunk.slices.begin; slice < chunk.slices.end; slice += VECTORS) {
      const Stored *keys[VECTORS], *fetch[VECTORS];
      for (int64_t n = 0; n < VECTORS; n++) {
        const int64_t i = std::min(slice + n, chunk.slices.end - 1);
        keys[n] = chunk.at[i].keys + chunk.at[i].lane * PAIR;
        fetch[n] = later[i - chunk.slices.begin] + chunk.at[i].lane * PAIR;
      }
      for_rows(active, [&](int64_t row, auto count) {
        if (space_.visible[std::min(row + count(), active.end) - 1].end <= chunk.at[slice].position) return;
        multiply_keys<Format, count(), VECTORS>(space_.queries[row], keys, fetch, lanes_ * PAIR, size_,
                                                space_.scores[row] + slice * LANES);
      });
    }
  }

#ifdef HAS_MATRICES
  // Call f(row, number of rows, whether they are the first) for rows of matrices.
  template <class F>
  static void for_matrix_rows(Span rows, F&& f) {
    for (int64_t row = rows.begin; row < rows.end; row += MATRIX_ROWS)
      f(row, std::min<int64_t>(MATRIX_ROWS, rows.end - row), row == rows.begin);
  }

  void multiply_queries_by_matrix(const Chunk& chunk, Span active, const Stored* const* later) {
    for_matrix_rows(active, [&](int64_t row, int64_t count, bool is_first) {
      for (int64_t slice = chunk.slices.begin; slice < chunk.slices.end; slice += MATRICES) {
        if (space_.visible[row + count - 1].end <= chunk.at[slice].position) break;
        const Stored *keys[MATRICES], *fetch[MATRICES];
        for (int64_t n = 0; n < MATRICES; n++) {
          const int64_t i = std::min(slice + n, chunk.slices.end - 1);
          keys[n] = chunk.at[i].keys + chunk.at[i].lane * PAIR;
          fetch[n] = later[i - chunk.slices.begin] + chunk.at[i].lane * PAIR;
        }
        multiply_keys(space_.queries[row], count, keys, is_first ? fetch : nullptr, lanes_ * PAIR, size_,
                      space_.scores[row] + slice * LANES);
      }
    });
  }

  void multiply_probabilities_by_matrix(const Chunk& chunk, Span active, const Stored* const* values,
                                        const Stored* const* fetch) {
    for_matrix_rows(active, [&](int64_t row, int64_t count, bool is_first) {
      auto [begin, end] = chunk.slices;
      while (chunk.at[begin].end() <= space_.visible[row].begin) begin++;
      while (chunk.at[end - 1].position >= space_.visible[row + count - 1].end) end--;
      int64_t feature = 0;
      for (; feature + MATRICES * LANES <= size_; feature += MATRICES * LANES)
        multiply_values<MATRICES>(space_.probabilities[row], count, values, is_first ? fetch : nullptr, {begin, end},
                                  size_ * PAIR, feature, space_.parts[row]);
      for (; feature < size_; feature += LANES)
        multiply_values<1>(space_.probabilities[row], count, values, is_first ? fetch : nullptr, {begin, end},
                           size_ * PAIR, feature, space_.parts[row]);
    });
  }
#endif

  __attribute__((noinline)) void softmax_all(const Chunk& chunk, int64_t row) {
    softmax_of({0, CHUNK_SLICES}, [](int64_t) { return Span{0, LANES}; }, chunk, row);
  }

  __attribute__((noinline)) void softmax_visible(const Chunk& chunk, int64_t row) {
    const Span visible = space_.visible[row];
    auto visible_lanes = [&](int64_t i) {
      if (i < chunk.slices.begin || i >= chunk.slices.end) return Span{0, 0};
      const Slice& slice = chunk.at[i];
      return Span{visible.begin - slice.position, std::min(visible.end - slice.position, slice.tokens)};
    };
    softmax_of(chunk.slices, visible_lanes, chunk, row);
  }

  template <class Visible>
  void softmax_of(Span slices, Visible&& visible, const Chunk& chunk, int64_t row) {
    const float scale = Format::HAS_SCALES ? scale_ * space_.query_factors[row] : scale_;
    space_.part_max[row] =
        softmax<Format>(slices, visible, scale, chunk.scales, space_.scores[row], space_.probabilities[row],
                        space_.parts[row] + width_, &space_.result_factors[row]);
  }

  void multiply_probabilities(const Task& task, const Chunk& chunk, Span active, const Stored* const* later) {
    const auto [begin, end] = chunk.slices;
    const Stored *values[CHUNK_SLICES], *fetch[CHUNK_SLICES];
    for (int64_t i = begin; i < end; i++) {
      const int64_t offset = chunk.at[i].lane * size_;
      values[i] = chunk.at[i].keys + values_at_ + offset;
      fetch[i] = later[i - begin] + offset;
    }
    if constexpr (!Format::HAS_SCALES) {  // codes are finite
      const int64_t known = metadata.seq_lens[task.request] - chunk.last().position;
      if (known < chunk.last().tokens) values[end - 1] = copy_known(values[end - 1], known);
    }
    if constexpr (BY_MATRIX) {
      if (suits_matrices_) return multiply_probabilities_by_matrix(chunk, active, values, fetch);
    }
    int64_t feature = 0;
    if (active.end - active.begin <= FEW_ROWS) cover<FEW_ROWS, MANY_VECTORS>(chunk, active, values, fetch, feature);
    cover<MAX_ROWS, VECTORS>(chunk, active, values, fetch, feature);
    cover<MAX_ROWS, 1>(chunk, active, values, fetch, feature);
    if (feature < size_)
      for (int64_t row = active.begin; row < active.end; row++)
        multiply_rest<Format>(space_.probabilities[row], values, chunk.slices, size_ * PAIR, feature,
                              &space_.result_factors[row], space_.parts[row]);
  }

  // Compute the features from `feature` on in steps of N vectors, while N vectors remain.
  template <int MOST, int N>
  void cover(const Chunk& chunk, Span active, const Stored* const* values, const Stored* const* fetch,
             int64_t& feature) {
    for (; feature + N * LANES <= size_; feature += N * LANES)
      for_rows<MOST>(active, [&](int64_t row, auto count) {
        const int64_t last = std::min(row + count(), active.end) - 1;
        auto [begin, end] = chunk.slices;
        while (chunk.at[begin].end() <= space_.visible[row].begin) begin++;
        while (chunk.at[end - 1].position >= space_.visible[last].end) end--;
        multiply_values<Format, count(), N>(space_.probabilities[row], values, fetch, {begin, end}, size_ * PAIR,
                                            feature, &space_.result_factors[row], space_.parts[row]);
      });
  }

  // Copy the values of a slice's first tokens, with zeros for the others: another request may have left values there
  // whose product with the probability 0 is NaN.
  const Stored* copy_known(const Stored* values, int64_t tokens) {
    const int64_t step = size_ * PAIR, known = tokens / PAIR * step;
    Stored* copy = space_.last_values;
    std::memcpy((void*)copy, values, size_t(known) * sizeof(Stored));
    std::memset((void*)(copy + known), 0, size_t(LANES * size_ - known) * sizeof(Stored));
    if (tokens % PAIR)
      for (int64_t i = 0; i < step; i += PAIR) copy[known + i] = values[known + i];
    return copy;
  }

  const T* queries_;
  const Stored* cache_;
  T* out_;
  Workspace<Format>& space_;
  const int64_t size_ = params.head_dim, width_ = round_up(size_, LANES), lanes_ = lanes_of_block(params);
  const int64_t values_at_ = lanes_ * size_;   // offset of the values in a block of a kv head
  const bool suits_matrices_ = size_ % 32 == 0;  // the features that a matrix instruction multiplies
  const float scale_ = params.scale * LOG2_E;  // makes the softmax one of powers of 2
  const Results results_;
};

}  // namespace

int64_t attend_scratch(const CAttentionParams& params, int64_t max_context, int num_threads) {
  const int64_t max_chunks = chunk_of(params, max_context - 1) + 1;
  return Scratch(params, count_shards(num_threads), max_chunks, nullptr).size();
}

template <class T>
void attend(const Shard& shard, const CAttentionParams& params, const CAttentionMetadata& metadata, const T* queries,
            const void* cache, T* out, float* scratch) {
  with_format<T>(params.cache_format, [&](auto format) {
    using Format = decltype(format);
    static thread_local Workspace<Format> space;
    Division division(params, metadata, shard);
    division.collect(space.pieces);
    Scratch parts(params, shard.count, division.max_chunks(), scratch);
    const auto* numbers = static_cast<const typename Format::Stored*>(cache);
    Attention<T, Format>(params, metadata, queries, numbers, out, parts, space).run();
  });
}

template void attend(const Shard&, const CAttentionParams&, const CAttentionMetadata&, const float*, const void*,
                     float*, float*);
template void attend(const Shard&, const CAttentionParams&, const CAttentionMetadata&, const Bf16*, const void*, Bf16*,
                     float*);

}  // namespace eagleray

using namespace eagleray;

extern "C" {

int64_t er_block_elements(const CAttentionParams* params) { return block_elements(*params); }

int64_t er_attention_scratch_size(const CAttentionParams* params, int64_t max_context, int num_threads) {
  return attend_scratch(*params, max_context, num_threads) * int64_t(sizeof(float));
}

void er_attend(const CAttentionParams* params, const CAttentionMetadata* metadata, const void* queries,
               const void* cache, void* out, float* scratch, int dtype, int num_threads) {
  run_phase(num_threads, [&](const Shard& shard) {
    if (dtype) attend(shard, *params, *metadata, (const Bf16*)queries, cache, (Bf16*)out, scratch);
    else attend(shard, *params, *metadata, (const float*)queries, cache, (float*)out, scratch);
  });
}

}  // extern "C"

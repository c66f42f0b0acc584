// How a share of the tasks is computed: tile by tile, and for each tile chunk by chunk of its context.
#include "attention_division.h"

namespace eagleray {
namespace {

constexpr float LOG2_E = 1.44269504088896341f;
constexpr int64_t AHEAD = 4;  // slices that are fetched from memory before they are read

// 16 lanes of a block.
template <class T>
struct Slice {
  int64_t position, tokens;  // the first one; there are fewer than 16 at the end of a block of an odd size
  const T* keys;             // of the block and kv head; the values follow
  int64_t lane;              // in the block

  int64_t end() const { return position + tokens; }
};

template <class T>
struct Chunk {
  Span slices;  // those that some row of the tile sees
  Slice<T> at[SLICES];

  const Slice<T>& first() const { return at[slices.begin]; }
  const Slice<T>& last() const { return at[slices.end - 1]; }
};

// What a thread works on.
template <class T>
struct Workspace {
  alignas(64) T queries[TILE + 1][MAX_HEAD_DIM];  // `for_rows` may run over by one
  alignas(64) float scores[TILE + 2][CHUNK];      // and slices over the end of the last row
  alignas(64) T probabilities[TILE + 1][CHUNK];
  alignas(64) float parts[TILE + 1][RESULT];  // of a chunk
  alignas(64) float totals[TILE][RESULT];     // of the chunks so far
  float part_tops[TILE], total_tops[TILE];
  alignas(64) T last_values[LANES * MAX_HEAD_DIM];
  Span seen[TILE];  // positions
  Chunk<T> chunks[2];
  std::vector<Piece> pieces;
};

template <class T>
class Attention : Places {
 public:
  Attention(const CAttentionParams& params, const CAttentionMetadata& metadata, const T* queries, const T* cache,
            T* out, const Scratch& scratch, Workspace<T>& space)
      : Places{params, metadata}, queries_(queries), cache_(cache), out_(out), scratch_(scratch), space_(space) {}

  void run() {
    const std::vector<Piece>& pieces = space_.pieces;
    for (size_t i = 0; i < pieces.size(); i++) run(pieces[i], pieces[std::min(i + 1, pieces.size() - 1)]);
  }

 private:
  void run(const Piece& piece, const Piece& following) {
    open(piece.task);
    find(piece.task, piece.chunks.begin, space_.chunks[0]);
    for (int64_t index = piece.chunks.begin, turn = 0; index < piece.chunks.end; index++, turn ^= 1) {
      const Chunk<T>& chunk = space_.chunks[turn];
      Chunk<T>& next = space_.chunks[turn ^ 1];
      if (index + 1 < piece.chunks.end) find(piece.task, index + 1, next);
      else find(following.task, following.chunks.begin, next);
      Span some = compute(piece.task, chunk, next);
      for (int64_t row = some.begin; row < some.end; row++) {
        if (piece.sharers == 1) add(row, space_.parts[row], space_.part_tops[row]);
        else put(piece, index, row);
      }
    }
    if (piece.sharers == 1 || merge_pieces(piece)) close(piece.task);
  }

  void open(const Task& task) {
    for (int64_t row = 0; row < task.end - task.begin; row++) {
      std::memcpy((void*)space_.queries[row], queries_ + offset(task, task.begin + row), size_t(size_) * sizeof(T));
      space_.seen[row] = seen(task, task.begin + row);
      space_.total_tops[row] = NONE;
    }
  }

  void close(const Task& task) {
    for (int64_t row = 0; row < task.end - task.begin; row++)
      finish(space_.totals[row], space_.totals[row] + width_, sunk(task, row), size_,
             out_ + offset(task, task.begin + row));
  }

  float sunk(const Task& task, int64_t row) const {
    if (!params.sinks) return 0;
    return std::exp2(params.sinks[head(task, task.begin + row)] * LOG2_E - space_.total_tops[row]);
  }

  void add(int64_t row, const float* part, float top) {
    float &total_top = space_.total_tops[row], *total = space_.totals[row];
    if (total_top != NONE) return merge(total, &total_top, part, top, width_ + LANES);
    std::memcpy(total, part, size_t(width_ + LANES) * sizeof(float));
    total_top = top;
  }

  void put(const Piece& piece, int64_t chunk, int64_t row) {
    chunk -= chunks(piece.task).begin;
    std::memcpy(scratch_.result(piece.owner, chunk, row), space_.parts[row], size_t(width_ + LANES) * sizeof(float));
    scratch_.top(piece.owner, chunk, row) = space_.part_tops[row];
  }

  // By the last share to come; the others need not.
  bool merge_pieces(const Piece& piece) {
    std::atomic<int32_t>& done = scratch_.done(piece.owner);
    if (done.fetch_add(1, std::memory_order_acq_rel) != piece.sharers - 1) return false;
    done.store(0, std::memory_order_relaxed);
    const Span all = chunks(piece.task);
    for (int64_t chunk = 0; chunk < all.end - all.begin; chunk++)
      for (int64_t row = 0; row < group; row++)
        add(row, scratch_.result(piece.owner, chunk, row), scratch_.top(piece.owner, chunk, row));
    return true;
  }

  void find(const Task& task, int64_t index, Chunk<T>& chunk) const {
    const Span positions = seen(task);
    const int64_t base = index * SLICES;
    const int64_t begin = std::max(slice_of(params, positions.begin), base);
    const int64_t end = std::min(slice_of(params, positions.end - 1) + 1, base + SLICES);
    const int32_t* table = metadata.block_table + task.request * metadata.table_stride;
    int64_t block = begin / (lanes_ / LANES), lane = begin % (lanes_ / LANES) * LANES;
    chunk.slices = {begin - base, end - base};
    for (int64_t i = begin; i < end; i++) {
      const T* keys = cache_ + (table[block] * params.num_kv_heads + task.kv_head) * 2 * values_at_;
      const int64_t position = block * params.block_size + lane, left = params.block_size - lane;
      chunk.at[i - base] = {position, std::min<int64_t>(left, LANES), keys, lane};
      lane += LANES;
      if (lane == lanes_) lane = 0, block++;
    }
  }

  // Results of a chunk for the rows that see it, which are returned. `next` is what will be read after it.
  Span compute(const Task& task, const Chunk<T>& chunk, const Chunk<T>& next) {
    Span some = {0, task.end - task.begin};
    while (space_.seen[some.begin].end <= chunk.first().position) some.begin++;
    while (space_.seen[some.end - 1].begin >= chunk.last().end()) some.end--;
    const T* order[2 * SLICES + AHEAD];  // what is read: this chunk's keys, its values, the next one's keys
    const int64_t count = chunk.slices.end - chunk.slices.begin;
    for (int64_t i = 0; i < count; i++) {
      order[i] = chunk.at[chunk.slices.begin + i].keys;
      order[count + i] = order[i] + values_at_;
    }
    for (int64_t i = 0; i < AHEAD; i++)
      order[2 * count + i] = next.at[std::min(next.slices.begin + i, next.slices.end - 1)].keys;
    score(chunk, some, order + AHEAD);
    const bool whole = count == SLICES && params.block_size % LANES == 0;
    for (int64_t row = some.begin; row < some.end; row++) {
      const Span seen = space_.seen[row];
      const bool all = whole && seen.begin <= chunk.first().position && seen.end >= chunk.last().end();
      all ? soften_all(row) : soften_seen(chunk, row);
    }
    weigh(task, chunk, some, order + count + AHEAD);
    return some;
  }

  void score(const Chunk<T>& chunk, Span some, const T* const* later) {
    for (int64_t slice = chunk.slices.begin; slice < chunk.slices.end; slice += VECTORS) {
      const T *keys[VECTORS], *fetch[VECTORS];
      for (int64_t n = 0; n < VECTORS; n++) {
        const int64_t i = std::min(slice + n, chunk.slices.end - 1);
        keys[n] = chunk.at[i].keys + chunk.at[i].lane * PAIR<T>;
        fetch[n] = later[i - chunk.slices.begin] + chunk.at[i].lane * PAIR<T>;
      }
      for_rows(some, [&](int64_t row, auto count) {
        if (space_.seen[std::min(row + count(), some.end) - 1].end <= chunk.at[slice].position) return;
        multiply_keys<T, count(), VECTORS>(space_.queries[row], keys, fetch, lanes_ * PAIR<T>, size_,
                                           space_.scores[row] + slice * LANES);
      });
    }
  }

  __attribute__((noinline)) void soften_all(int64_t row) {
    space_.part_tops[row] = soften<T>({0, SLICES}, [](int64_t) { return Span{0, LANES}; }, scale_, space_.scores[row],
                                      space_.probabilities[row], space_.parts[row] + width_);
  }

  __attribute__((noinline)) void soften_seen(const Chunk<T>& chunk, int64_t row) {
    const Span seen = space_.seen[row];
    auto shown = [&](int64_t i) {
      if (i < chunk.slices.begin || i >= chunk.slices.end) return Span{0, 0};
      const Slice<T>& slice = chunk.at[i];
      return Span{seen.begin - slice.position, std::min(seen.end - slice.position, slice.tokens)};
    };
    space_.part_tops[row] = soften<T>(chunk.slices, shown, scale_, space_.scores[row], space_.probabilities[row],
                                      space_.parts[row] + width_);
  }

  void weigh(const Task& task, const Chunk<T>& chunk, Span some, const T* const* later) {
    const auto [begin, end] = chunk.slices;
    const T *values[SLICES], *fetch[SLICES];
    for (int64_t i = begin; i < end; i++) {
      const int64_t offset = chunk.at[i].lane * size_;
      values[i] = chunk.at[i].keys + values_at_ + offset;
      fetch[i] = later[i - begin] + offset;
    }
    const int64_t known = metadata.seq_lens[task.request] - chunk.last().position;
    if (known < chunk.last().tokens) values[end - 1] = copy_known(values[end - 1], known);
    int64_t feature = 0;
    if (some.end - some.begin <= FEW_ROWS) cover<FEW_ROWS, MANY_VECTORS>(chunk, some, values, fetch, feature);
    cover<MAX_ROWS, VECTORS>(chunk, some, values, fetch, feature);
    cover<MAX_ROWS, 1>(chunk, some, values, fetch, feature);
    if (feature < size_)
      for (int64_t row = some.begin; row < some.end; row++)
        multiply_rest(space_.probabilities[row], values, chunk.slices, size_ * PAIR<T>, feature, space_.parts[row]);
  }

  // Features from `feature` on, as long as there are N vectors of them.
  template <int MOST, int N>
  void cover(const Chunk<T>& chunk, Span some, const T* const* values, const T* const* fetch, int64_t& feature) {
    for (; feature + N * LANES <= size_; feature += N * LANES)
      for_rows<MOST>(some, [&](int64_t row, auto count) {
        const int64_t last = std::min(row + count(), some.end) - 1;
        auto [begin, end] = chunk.slices;
        while (chunk.at[begin].end() <= space_.seen[row].begin) begin++;
        while (chunk.at[end - 1].position >= space_.seen[last].end) end--;
        multiply_values<T, count(), N>(space_.probabilities[row], values, fetch, {begin, end}, size_ * PAIR<T>, feature,
                                       space_.parts[row]);
      });
  }

  // The first tokens of a slice's values, and zeros for the rest: 0 times what another request left there may be NaN.
  const T* copy_known(const T* values, int64_t tokens) {
    const int64_t step = size_ * PAIR<T>, known = tokens / PAIR<T> * step;
    T* copy = space_.last_values;
    std::memcpy((void*)copy, values, size_t(known) * sizeof(T));
    std::memset((void*)(copy + known), 0, size_t(LANES * size_ - known) * sizeof(T));
    if (tokens % PAIR<T>)
      for (int64_t i = 0; i < step; i += PAIR<T>) copy[known + i] = values[known + i];
    return copy;
  }

  const T* queries_;
  const T* cache_;
  T* out_;
  const Scratch& scratch_;
  Workspace<T>& space_;
  const int64_t size_ = params.head_dim, width_ = round_up(size_, LANES), lanes_ = lanes_of_block(params);
  const int64_t values_at_ = lanes_ * size_;                // in a block of a kv head
  const float scale_ = params.scale * LOG2_E;                // for powers of 2
};

// In which a crew divides a phase.
int64_t num_shares(int num_threads) {
  Crew::State state;
  int64_t size = 0;
  Crew(&state, num_threads).each([&](Team team) { size = team.size; });
  return size;
}

}  // namespace

int64_t attend_scratch(const CAttentionParams& params, int64_t max_context, int num_threads) {
  const int64_t max_chunks = chunk_of(params, max_context - 1) + 1;
  return Scratch(params, num_shares(num_threads), max_chunks, nullptr).size();
}

template <class T>
void attend(const Team& team, const CAttentionParams& params, const CAttentionMetadata& metadata, const T* queries,
            const T* cache, T* out, float* scratch) {
  static thread_local Workspace<T> space;
  Division division(params, metadata, team);
  division.collect(space.pieces);
  Scratch parts(params, team.size, division.max_chunks(), scratch);
  Attention<T>(params, metadata, queries, cache, out, parts, space).run();
}

template void attend(const Team&, const CAttentionParams&, const CAttentionMetadata&, const float*, const float*,
                     float*, float*);
template void attend(const Team&, const CAttentionParams&, const CAttentionMetadata&, const Bf16*, const Bf16*, Bf16*,
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
  run_team(num_threads, [&](const Team& team) {
    if (dtype) attend(team, *params, *metadata, (const Bf16*)queries, (const Bf16*)cache, (Bf16*)out, scratch);
    else attend(team, *params, *metadata, (const float*)queries, (const float*)cache, (float*)out, scratch);
  });
}

}  // extern "C"

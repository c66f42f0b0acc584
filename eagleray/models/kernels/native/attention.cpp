// How the work of attention is divided, and how a tile of it is computed.
//
// A task is a tile of rows of one request and kv head, and a share of the crew's work is a range of tasks of equal
// cost. A request that computes one token may have a long context and nobody beside it, so its tasks are cut between
// chunks where a share ends; then the chunks' results go to the scratch, and the last share to come merges them.
#include <vector>

#include "attention_tile.h"

namespace eagleray {
namespace {

constexpr int64_t TILE = 48;    // rows
constexpr int64_t AHEAD = 4;    // slices that are fetched from memory before they are read
constexpr int64_t READING = 12;  // what it costs to read a chunk, if computing it with one row costs 1

struct Task {
  int64_t request, kv_head;
  int64_t begin, end;  // of the request's tokens x heads of the group, in this order
};

// What a share computes of a task.
struct Piece {
  Task task;
  Span chunks;
  int64_t owner, sharers;  // if cut: the first share that has some of it, and how many have
};

// 16 lanes of a block.
template <class T>
struct Slice {
  int64_t position, tokens;  // the first one; there are fewer than 16 at the end of a block of an odd size
  const T* keys;             // of the block and kv head; the values follow
  int64_t lane;              // in the block
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

// -- where things are

struct Places {
  const AttentionShape& shape;
  const Rows& rows;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t lanes = lanes_of_block(shape), per_block = lanes / LANES;

  int64_t slice_of(int64_t position) const {
    return position / shape.block_size * per_block + position % shape.block_size / LANES;
  }
  int64_t chunk_of(int64_t position) const { return slice_of(position) / SLICES; }
  int64_t num_queries(int64_t request) const { return rows.starts[request + 1] - rows.starts[request]; }

  Span seen(const Task& task, int64_t row) const {
    int64_t position = rows.context_lens[task.request] - num_queries(task.request) + row / group;
    return {shape.window ? std::max<int64_t>(position - shape.window + 1, 0) : 0, position + 1};
  }
  Span seen(const Task& task) const { return {seen(task, task.begin).begin, seen(task, task.end - 1).end}; }
  Span chunks(const Task& task) const {
    Span positions = seen(task);
    return {chunk_of(positions.begin), chunk_of(positions.end - 1) + 1};
  }
  // Of a row's query and result.
  int64_t offset(const Task& task, int64_t row) const {
    int64_t token = rows.starts[task.request] + row / group, head = task.kv_head * group + row % group;
    return (token * shape.num_heads + head) * shape.head_dim;
  }

  template <class T>
  void find(const Task& task, int64_t index, const T* cache, Chunk<T>& chunk) const {
    const Span positions = seen(task);
    const int64_t base = index * SLICES;
    const int64_t begin = std::max(slice_of(positions.begin), base);
    const int64_t end = std::min(slice_of(positions.end - 1) + 1, base + SLICES);
    const int32_t* table = rows.block_table + task.request * rows.table_stride;
    int64_t block = begin / per_block, lane = begin % per_block * LANES;
    chunk.slices = {begin - base, end - base};
    for (int64_t i = begin; i < end; i++) {
      chunk.at[i - base] = {block * shape.block_size + lane, std::min<int64_t>(shape.block_size - lane, LANES),
                            cache + (table[block] * shape.num_kv_heads + task.kv_head) * 2 * lanes * shape.head_dim, lane};
      lane += LANES;
      if (lane == lanes) lane = 0, block++;
    }
  }
};

// -- who computes what

class Division : Places {
 public:
  Division(const AttentionShape& shape, const Rows& rows, const Team& team) : Places{shape, rows}, team_(team) {
    for (int64_t request = 0; request < rows.num_rows; request++) {
      total_ += cost(request) * shape.num_kv_heads;
      if (can_be_cut(request)) {
        Span all = chunks(task(request, 0, 0));
        max_chunks_ = std::max(max_chunks_, all.end - all.begin);
      }
    }
  }

  // The chunks of the longest request that can be cut.
  int64_t max_chunks() const { return max_chunks_; }

  void collect(std::vector<Piece>& pieces) const {
    const Span own = share_of(team_.rank);
    int64_t at = 0;
    pieces.clear();
    for (int64_t request = 0; request < rows.num_rows && at < own.end; request++) {
      const int64_t request_cost = cost(request);
      for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; kv_head++, at += request_cost)
        if (at + request_cost > own.begin && at < own.end) collect(request, kv_head, at, own, pieces);
    }
  }

 private:
  int64_t tiles(int64_t request) const { return (num_queries(request) * group + TILE - 1) / TILE; }
  bool can_be_cut(int64_t request) const { return num_queries(request) == 1 && group <= TILE; }

  Task task(int64_t request, int64_t kv_head, int64_t tile) const {
    return {request, kv_head, tile * TILE, std::min((tile + 1) * TILE, num_queries(request) * group)};
  }
  int64_t cost_of_chunk(const Task& task) const { return READING + task.end - task.begin; }
  int64_t cost(const Task& task) const {
    Span all = chunks(task);
    return (all.end - all.begin) * cost_of_chunk(task);
  }
  int64_t cost(int64_t request) const {  // of one kv head
    int64_t sum = 0;
    for (int64_t tile = 0; tile < tiles(request); tile++) sum += cost(task(request, 0, tile));
    return sum;
  }

  Span share_of(int64_t rank) const { return {total_ * rank / team_.size, total_ * (rank + 1) / team_.size}; }

  void collect(int64_t request, int64_t kv_head, int64_t at, Span own, std::vector<Piece>& pieces) const {
    for (int64_t tile = 0; tile < tiles(request); tile++) {
      const Task one = task(request, kv_head, tile);
      if (can_be_cut(request)) cut(one, at, pieces);
      else if (at >= own.begin && at < own.end) pieces.push_back({one, chunks(one), 0, 1});
      at += cost(one);
    }
  }

  // A chunk belongs to the share in which its cost begins.
  void cut(const Task& task, int64_t at, std::vector<Piece>& pieces) const {
    const Span all = chunks(task);
    auto part = [&](int64_t rank) {
      auto first_from = [&](int64_t cost) {
        int64_t chunk = (cost - at + cost_of_chunk(task) - 1) / cost_of_chunk(task);
        return cost <= at ? all.begin : std::min(all.begin + chunk, all.end);
      };
      const Span share = share_of(rank);
      return Span{first_from(share.begin), first_from(share.end)};
    };
    const Span own = part(team_.rank);
    if (own.begin == own.end) return;
    Piece piece{task, own, team_.rank, 1};
    if (own.begin > all.begin || own.end < all.end)
      for (int64_t rank = piece.sharers = 0; rank < team_.size; rank++) {
        const Span other = part(rank);
        if (other.begin == other.end) continue;
        if (other.begin == all.begin) piece.owner = rank;
        piece.sharers++;
      }
    pieces.push_back(piece);
  }

  const Team& team_;
  int64_t total_ = 0, max_chunks_ = 0;
};

// -- results of tasks that are cut. For each share that begins one: how many shares are done with it; and for every
// chunk and row the features, the sums and the top.

class Scratch {
 public:
  Scratch(const AttentionShape& shape, int64_t num_shares, int64_t max_chunks, float* memory)
      : group_(shape.num_heads / shape.num_kv_heads),
        row_size_(round_up(shape.head_dim, LANES) + 2 * LANES),
        task_size_(max_chunks * group_ * row_size_),
        size_(num_shares > 1 && group_ <= TILE ? num_shares * (LANES + task_size_) : 0),
        counts_(memory),
        results_(memory + num_shares * LANES) {}

  int64_t size() const { return size_; }
  std::atomic<int32_t>& done(int64_t owner) const {
    return *reinterpret_cast<std::atomic<int32_t>*>(counts_ + owner * LANES);
  }
  float* result(int64_t owner, int64_t chunk, int64_t row) const {
    return results_ + owner * task_size_ + (chunk * group_ + row) * row_size_;
  }
  float& top(int64_t owner, int64_t chunk, int64_t row) const { return result(owner, chunk, row)[row_size_ - LANES]; }

 private:
  int64_t group_, row_size_, task_size_, size_;
  float *counts_, *results_;
};

// -- the computation

template <class T>
class Attention : Places {
 public:
  Attention(const AttentionShape& shape, const Rows& rows, const T* queries, const T* cache, T* out,
            const Scratch& scratch, Workspace<T>& space)
      : Places{shape, rows}, queries_(queries), cache_(cache), out_(out), scratch_(scratch), space_(space) {}

  void run() {
    const std::vector<Piece>& pieces = space_.pieces;
    for (size_t i = 0; i < pieces.size(); i++) run(pieces[i], pieces[std::min(i + 1, pieces.size() - 1)]);
  }

 private:
  void run(const Piece& piece, const Piece& following) {
    open(piece.task);
    find(piece.task, piece.chunks.begin, cache_, space_.chunks[0]);
    for (int64_t index = piece.chunks.begin, turn = 0; index < piece.chunks.end; index++, turn ^= 1) {
      const Chunk<T>& chunk = space_.chunks[turn];
      Chunk<T>& next = space_.chunks[turn ^ 1];
      if (index + 1 < piece.chunks.end) find(piece.task, index + 1, cache_, next);
      else find(following.task, following.chunks.begin, cache_, next);
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
      finish(space_.totals[row], space_.totals[row] + width_, size_, out_ + offset(task, task.begin + row));
  }

  void add(int64_t row, const float* part, float top) {
    if (space_.total_tops[row] != NONE) return merge(space_.totals[row], &space_.total_tops[row], part, top, width_ + LANES);
    std::memcpy(space_.totals[row], part, size_t(width_ + LANES) * sizeof(float));
    space_.total_tops[row] = top;
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

  // Results of a chunk for the rows that see it, which are returned. `next` is what will be read after it.
  Span compute(const Task& task, const Chunk<T>& chunk, const Chunk<T>& next) {
    Span some = {0, task.end - task.begin};
    while (space_.seen[some.begin].end <= chunk.first().position) some.begin++;
    while (space_.seen[some.end - 1].begin >= chunk.last().position + chunk.last().tokens) some.end--;
    const T* order[2 * SLICES + AHEAD];  // what is read: this chunk's keys, its values, the next one's keys
    const int64_t count = chunk.slices.end - chunk.slices.begin;
    for (int64_t i = 0; i < count; i++) {
      order[i] = chunk.at[chunk.slices.begin + i].keys;
      order[count + i] = order[i] + values_;
    }
    for (int64_t i = 0; i < AHEAD; i++) order[2 * count + i] = next.at[std::min(next.slices.begin + i, next.slices.end - 1)].keys;
    score(chunk, some, order + AHEAD);
    const bool whole = count == SLICES && shape.block_size % LANES == 0;
    for (int64_t row = some.begin; row < some.end; row++) {
      const Span seen = space_.seen[row];
      const bool all = whole && seen.begin <= chunk.first().position && seen.end >= chunk.last().position + LANES;
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
        multiply_keys<T, count(), VECTORS>(space_.queries[row], keys, fetch, lanes * PAIR<T>, size_,
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
    const T *values[SLICES], *fetch[SLICES];
    for (int64_t i = chunk.slices.begin; i < chunk.slices.end; i++) {
      const int64_t offset = chunk.at[i].lane * size_;
      values[i] = chunk.at[i].keys + values_ + offset;
      fetch[i] = later[i - chunk.slices.begin] + offset;
    }
    const int64_t known = rows.context_lens[task.request] - chunk.last().position;
    if (known < chunk.last().tokens) values[chunk.slices.end - 1] = copy_known(values[chunk.slices.end - 1], known);
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
        Span slices = chunk.slices;
        while (chunk.at[slices.begin].position + chunk.at[slices.begin].tokens <= space_.seen[row].begin) slices.begin++;
        while (chunk.at[slices.end - 1].position >= space_.seen[std::min(row + count(), some.end) - 1].end) slices.end--;
        multiply_values<T, count(), N>(space_.probabilities[row], values, fetch, slices, size_ * PAIR<T>, feature,
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
  const int64_t size_ = shape.head_dim, width_ = round_up(size_, LANES);
  const int64_t values_ = lanes * size_;                     // where they begin in a block of a kv head
  const float scale_ = shape.scale * 1.44269504088896341f;  // for powers of 2
};

int64_t num_shares(int num_threads) {
  Crew::State state;
  int64_t size = 0;
  Crew(&state, num_threads).each([&](Team team) { size = team.size; });
  return size;
}

}  // namespace

int64_t attend_scratch(const AttentionShape& shape, int64_t max_context, int num_threads) {
  const int64_t max_chunks = Places{shape, {}}.chunk_of(max_context - 1) + 1;
  return Scratch(shape, num_shares(num_threads), max_chunks, nullptr).size();
}

template <class T>
void attend(const Team& team, const AttentionShape& shape, const Rows& rows, const T* queries, const T* cache, T* out,
            float* scratch) {
  static thread_local Workspace<T> space;
  Division division(shape, rows, team);
  division.collect(space.pieces);
  Scratch parts(shape, team.size, division.max_chunks(), scratch);
  Attention<T>(shape, rows, queries, cache, out, parts, space).run();
}

template void attend(const Team&, const AttentionShape&, const Rows&, const float*, const float*, float*, float*);
template void attend(const Team&, const AttentionShape&, const Rows&, const Bf16*, const Bf16*, Bf16*, float*);

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int64_t er_block_elements(const AttentionShape* shape) { return block_elements(*shape); }

EXPORT int64_t er_attend_scratch(const AttentionShape* shape, int64_t max_context, int num_threads) {
  return attend_scratch(*shape, max_context, num_threads);
}

// dtype: 0 is float32, 1 bfloat16.
EXPORT void er_attend(const AttentionShape* shape, const Rows* rows, const void* queries, const void* cache, void* out,
                      float* scratch, int dtype, int num_threads) {
  run_team(num_threads, [&](const Team& team) {
    if (dtype) attend(team, *shape, *rows, (const Bf16*)queries, (const Bf16*)cache, (Bf16*)out, scratch);
    else attend(team, *shape, *rows, (const float*)queries, (const float*)cache, (float*)out, scratch);
  });
}

}  // namespace eagleray

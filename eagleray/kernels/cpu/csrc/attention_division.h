// How the work of attention is divided into shares of equal cost.
//
// A task is a tile of rows of one request and kv head; a share is a range of tasks. A request that computes one token
// may have a long context and nobody beside it, so its tasks are cut between chunks where a share ends. Then the
// results of the chunks go to the scratch, and the last share to come merges them.
#pragma once

#include <vector>

#include "attention_tile.h"

namespace eagleray {
namespace {

constexpr int64_t TILE = 48;     // rows
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

inline int64_t slice_of(const CAttentionParams& params, int64_t position) {
  return position / params.block_size * (lanes_of_block(params) / LANES) + position % params.block_size / LANES;
}
inline int64_t chunk_of(const CAttentionParams& params, int64_t position) {
  return slice_of(params, position) / SLICES;
}

// Where the rows of a task are, and what they see.
struct Places {
  const CAttentionParams& params;
  const CAttentionMetadata& metadata;
  const int64_t group = params.num_heads / params.num_kv_heads;

  int64_t num_queries(int64_t request) const {
    return metadata.query_start_loc[request + 1] - metadata.query_start_loc[request];
  }

  Span seen(const Task& task, int64_t row) const {
    int64_t position = metadata.seq_lens[task.request] - num_queries(task.request) + row / group;
    return {params.window ? std::max<int64_t>(position - params.window + 1, 0) : 0, position + 1};
  }
  Span seen(const Task& task) const { return {seen(task, task.begin).begin, seen(task, task.end - 1).end}; }
  Span chunks(const Task& task) const {
    Span positions = seen(task);
    return {chunk_of(params, positions.begin), chunk_of(params, positions.end - 1) + 1};
  }
  int64_t head(const Task& task, int64_t row) const { return task.kv_head * group + row % group; }
  // Of a row's query and result.
  int64_t offset(const Task& task, int64_t row) const {
    int64_t token = metadata.query_start_loc[task.request] + row / group;
    return (token * params.num_heads + head(task, row)) * params.head_dim;
  }
};

class Division : Places {
 public:
  Division(const CAttentionParams& params, const CAttentionMetadata& metadata, const Team& team)
      : Places{params, metadata}, team_(team) {
    for (int64_t request = 0; request < metadata.num_rows; request++) {
      total_ += cost(request) * params.num_kv_heads;
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
    for (int64_t request = 0; request < metadata.num_rows && at < own.end; request++) {
      const int64_t request_cost = cost(request);
      for (int64_t kv_head = 0; kv_head < params.num_kv_heads; kv_head++, at += request_cost)
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

// Results of tasks that are cut. For each share that begins one: how many shares are done with it; and for every chunk
// and row the features, the sums and the top.
class Scratch {
 public:
  Scratch(const CAttentionParams& params, int64_t num_shares, int64_t max_chunks, float* memory)
      : group_(params.num_heads / params.num_kv_heads),
        row_size_(round_up(params.head_dim, LANES) + 2 * LANES),
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

}  // namespace
}  // namespace eagleray

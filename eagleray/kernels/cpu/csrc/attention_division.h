// The division of attention into shards of equal cost.
//
// A task is a tile of rows of one request and kv head; a shard is a range of tasks. A request that computes one token
// may have a long context and be alone in the batch, so its tasks are split between chunks where a shard ends. The
// results of such chunks go to the scratch, and the last shard to finish merges them.
#pragma once

#include <vector>

#include "attention_tile.h"

namespace eagleray {
namespace {

constexpr int64_t TILE = 48;       // rows
constexpr int64_t READ_COST = 12;  // of a chunk, relative to computing it for one row

struct Task {
  int64_t request, kv_head;
  int64_t begin, end;  // rows: the request's tokens x the heads of the group, in this order
};

// The part of a task that a shard computes.
struct Piece {
  Task task;
  Span chunks;
  int64_t first_shard, num_shards;  // that compute the task
};

inline int64_t slice_of(const CAttentionParams& params, int64_t position) {
  return position / params.block_size * (lanes_of_block(params) / LANES) + position % params.block_size / LANES;
}
inline int64_t chunk_of(const CAttentionParams& params, int64_t position) {
  return slice_of(params, position) / CHUNK_SLICES;
}

// The rows of a task: their offsets in memory and the positions they see.
struct TaskRows {
  const CAttentionParams& params;
  const CAttentionMetadata& metadata;
  const int64_t group = params.num_heads / params.num_kv_heads;

  int64_t num_queries(int64_t request) const {
    return metadata.query_start_loc[request + 1] - metadata.query_start_loc[request];
  }

  Span visible(const Task& task, int64_t row) const {
    int64_t position = metadata.seq_lens[task.request] - num_queries(task.request) + row / group;
    return {params.window ? std::max<int64_t>(position - params.window + 1, 0) : 0, position + 1};
  }
  Span visible(const Task& task) const { return {visible(task, task.begin).begin, visible(task, task.end - 1).end}; }
  Span chunks(const Task& task) const {
    Span positions = visible(task);
    return {chunk_of(params, positions.begin), chunk_of(params, positions.end - 1) + 1};
  }
  int64_t head(const Task& task, int64_t row) const { return task.kv_head * group + row % group; }
  // Offset of a row's query and result.
  int64_t offset(const Task& task, int64_t row) const {
    int64_t token = metadata.query_start_loc[task.request] + row / group;
    return (token * params.num_heads + head(task, row)) * params.head_dim;
  }
};

class Division : TaskRows {
 public:
  Division(const CAttentionParams& params, const CAttentionMetadata& metadata, const Shard& shard)
      : TaskRows{params, metadata}, shard_(shard) {
    for (int64_t request = 0; request < metadata.num_rows; request++) {
      total_ += cost(request) * params.num_kv_heads;
      if (can_be_split(request)) {
        Span all = chunks(task(request, 0, 0));
        max_chunks_ = std::max(max_chunks_, all.end - all.begin);
      }
    }
  }

  // The number of chunks of the longest request that can be split.
  int64_t max_chunks() const { return max_chunks_; }

  void collect(std::vector<Piece>& pieces) const {
    const Span own = shard_range(shard_.index);
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
  bool can_be_split(int64_t request) const { return num_queries(request) == 1; }

  Task task(int64_t request, int64_t kv_head, int64_t tile) const {
    return {request, kv_head, tile * TILE, std::min((tile + 1) * TILE, num_queries(request) * group)};
  }
  int64_t cost_of_chunk(const Task& task) const { return READ_COST + task.end - task.begin; }
  int64_t cost(const Task& task) const {
    Span all = chunks(task);
    return (all.end - all.begin) * cost_of_chunk(task);
  }
  int64_t cost(int64_t request) const {  // of one kv head
    int64_t sum = 0;
    for (int64_t tile = 0; tile < tiles(request); tile++) sum += cost(task(request, 0, tile));
    return sum;
  }

  Span shard_range(int64_t index) const { return {total_ * index / shard_.count, total_ * (index + 1) / shard_.count}; }

  void collect(int64_t request, int64_t kv_head, int64_t at, Span own, std::vector<Piece>& pieces) const {
    for (int64_t tile = 0; tile < tiles(request); tile++) {
      const Task one = task(request, kv_head, tile);
      if (can_be_split(request)) split(one, at, pieces);
      else if (at >= own.begin && at < own.end) pieces.push_back({one, chunks(one), 0, 1});
      at += cost(one);
    }
  }

  // A chunk belongs to the shard in which its cost begins.
  void split(const Task& task, int64_t at, std::vector<Piece>& pieces) const {
    const Span all = chunks(task);
    auto part = [&](int64_t index) {
      auto first_from = [&](int64_t cost) {
        int64_t chunk = (cost - at + cost_of_chunk(task) - 1) / cost_of_chunk(task);
        return cost <= at ? all.begin : std::min(all.begin + chunk, all.end);
      };
      const Span range = shard_range(index);
      return Span{first_from(range.begin), first_from(range.end)};
    };
    const Span own = part(shard_.index);
    if (own.begin == own.end) return;
    Piece piece{task, own, shard_.index, 1};
    if (own.begin > all.begin || own.end < all.end)
      for (int64_t index = piece.num_shards = 0; index < shard_.count; index++) {
        const Span other = part(index);
        if (other.begin == other.end) continue;
        if (other.begin == all.begin) piece.first_shard = index;
        piece.num_shards++;
      }
    pieces.push_back(piece);
  }

  const Shard& shard_;
  int64_t total_ = 0, max_chunks_ = 0;
};

}  // namespace
}  // namespace eagleray

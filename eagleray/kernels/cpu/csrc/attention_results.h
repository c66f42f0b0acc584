// The results of attention chunk by chunk, and how they are merged in order, by one shard or by the last of several.
#pragma once

#include "attention_division.h"

namespace eagleray {
namespace {

// Results of tasks that are split. For each first shard: how many shards have finished its task, and for every chunk
// and row the features, the sums and the highest score.
class Scratch {
 public:
  Scratch(const CAttentionParams& params, int64_t num_shards, int64_t max_chunks, float* memory)
      : num_rows_(std::min(params.num_heads / params.num_kv_heads, TILE)),
        row_size_(round_up(params.head_dim, LANES) + 2 * LANES),
        task_size_(max_chunks * num_rows_ * row_size_),
        size_(num_shards > 1 ? num_shards * (LANES + task_size_) : 0),
        counts_(memory),
        results_(memory + num_shards * LANES) {}

  int64_t size() const { return size_; }
  std::atomic<int32_t>& done(int64_t first_shard) const {
    return *reinterpret_cast<std::atomic<int32_t>*>(counts_ + first_shard * LANES);
  }
  float* result(int64_t first_shard, int64_t chunk, int64_t row) const {
    return results_ + first_shard * task_size_ + (chunk * num_rows_ + row) * row_size_;
  }
  float& max_score(int64_t first_shard, int64_t chunk, int64_t row) const {
    return result(first_shard, chunk, row)[row_size_ - LANES];
  }

 private:
  int64_t num_rows_, row_size_, task_size_, size_;
  float *counts_, *results_;
};

// The results of a task's rows. A result is the weighted sum of the values, [features, 16 partial sums of the
// probabilities], relative to the row's highest score.
struct Results {
  const Scratch& scratch;
  float *parts, *totals;         // [rows, step] of one chunk, and of the chunks so far
  float *part_max, *total_max;   // [rows] highest scores
  int64_t step, size;            // of a result: in memory, and without padding

  void clear(const Task& task) const { std::fill_n(total_max, task.end - task.begin, NO_SCORE); }

  // Take the parts of these rows: merge them, or keep them until all shards have finished the task.
  void take(const Piece& piece, int64_t chunk, int64_t first_chunk, Span rows) const {
    for (int64_t row = rows.begin; row < rows.end; row++) {
      const float* part = parts + row * step;
      if (piece.num_shards == 1) {
        add(row, part, part_max[row]);
        continue;
      }
      std::memcpy(scratch.result(piece.first_shard, chunk - first_chunk, row), part, size_t(size) * sizeof(float));
      scratch.max_score(piece.first_shard, chunk - first_chunk, row) = part_max[row];
    }
  }

  // Whether the totals of the piece's task are complete. If several shards compute the task, the last one to finish
  // merges the parts, and only there it is true.
  bool complete(const Piece& piece, Span chunks) const {
    if (piece.num_shards == 1) return true;
    std::atomic<int32_t>& done = scratch.done(piece.first_shard);
    if (done.fetch_add(1, std::memory_order_acq_rel) != piece.num_shards - 1) return false;
    done.store(0, std::memory_order_relaxed);
    for (int64_t chunk = 0; chunk < chunks.end - chunks.begin; chunk++)
      for (int64_t row = 0; row < piece.task.end - piece.task.begin; row++)
        add(row, scratch.result(piece.first_shard, chunk, row), scratch.max_score(piece.first_shard, chunk, row));
    return true;
  }

 private:
  void add(int64_t row, const float* part, float max_score) const {
    float *total = totals + row * step, &total_max_score = total_max[row];
    if (total_max_score != NO_SCORE) return merge(total, &total_max_score, part, max_score, size);
    std::memcpy(total, part, size_t(size) * sizeof(float));
    total_max_score = max_score;
  }
};

// The number of shards into which a team of threads divides a phase.
inline int64_t count_shards(int num_threads) {
  Team::State state;
  int64_t count = 0;
  Team(&state, num_threads).for_each_shard([&](Shard shard) { count = shard.count; });
  return count;
}

}  // namespace
}  // namespace eagleray

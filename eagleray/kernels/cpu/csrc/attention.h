// Attention over the paged cache.
//
// A layer's cache is [blocks][kv heads][keys, then values]. In both, each token of a block is a lane, and a block has
// round_up(block_size, 16) lanes. With PAIR numbers in a word (2 of bfloat16, 1 of float):
//
//   keys    [head_dim / PAIR][lanes][PAIR]   a register holds 16 tokens: scores += dot(query pair, keys)
//   values  [lanes / PAIR][head_dim][PAIR]   a register holds 16 features: results += dot(probability pair, values)
//
// A cache of 8-bit codes has the same layout with PAIR = 2, so a register is filled from half as many bytes. The values of
// each block and kv head are followed by the scales of its keys, then those of its values, each bfloat16 [lanes]
// (cache_format.h).
//
// The cache begins as zeros. Lanes beyond block_size are never written. Lanes beyond the end of a row's context hold
// numbers that another request left there, possibly NaN; none of them reaches a result.
//
// The keys of a context are divided into chunks at fixed positions. Each chunk has its own softmax, and the results of
// the chunks are merged in order. Therefore a query's result is the same number whether it is computed alone or in a
// batch, within its prompt or after it, and however the work is divided among threads.
#pragma once

#include "base.h"

namespace eagleray {

inline int64_t lanes_of_block(const CAttentionParams& params) { return round_up(params.block_size, LANES); }

// The numbers of elements of a kv head's part of a block, and of a whole block, in the cache of a layer.
inline int64_t head_elements(const CAttentionParams& params) {
  const int64_t scales = params.cache_format == CACHE_PLAIN ? 0 : 2 * int64_t(sizeof(Bf16));
  return lanes_of_block(params) * (2 * params.head_dim + scales);
}
inline int64_t block_elements(const CAttentionParams& params) { return params.num_kv_heads * head_elements(params); }

// Split qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] into queries, keys and values. Queries and keys are
// normalized if q_norm and k_norm [head_dim] are not null, and rotated by their position with the tables cos and sin
// [positions, head_dim / 2]. Queries go to [num_tokens, num_heads * head_dim], keys and values to their slots.
template <class T>
void prepare(const Shard& shard, const CAttentionParams& params, const CAttentionMetadata& metadata, const float* qkv,
             const float* q_norm, const float* k_norm, float eps, const float* cos, const float* sin, T* queries,
             void* cache);

// The number of floats of scratch that a team of `num_threads` needs for contexts up to `max_context`. The scratch
// begins as zeros and serves one phase at a time.
int64_t attend_scratch(const CAttentionParams& params, int64_t max_context, int num_threads);

// Attention of all queries over their rows' contexts -> out [num_tokens, num_heads * head_dim]. `prepare` must have
// finished for the whole batch. Infinities and NaN in a token may reach other tokens of the same row that are computed
// with it, but no other row.
template <class T>
void attend(const Shard& shard, const CAttentionParams& params, const CAttentionMetadata& metadata, const T* queries,
            const void* cache, T* out, float* scratch);

}  // namespace eagleray

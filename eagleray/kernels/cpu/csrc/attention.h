// Attention over the paged cache.
//
// A layer's cache is [blocks][kv heads][keys, then values]. In both, the tokens of a block are lanes; there are
// round_up(block_size, 16) of them. With PAIR numbers to a word (2 of bfloat16, 1 of float):
//
//   keys    [head_dim / PAIR][lanes][PAIR]   16 tokens in a register: their scores grow by dot(query pair, keys)
//   values  [lanes / PAIR][head_dim][PAIR]   16 features in a register: they grow by dot(probability pair, values)
//
// The cache begins as zeros. Lanes behind block_size are never written. Lanes behind the end of a row's context hold
// what another request left there, perhaps NaN: nothing of it reaches a result.
//
// The keys of a context are cut at fixed places into chunks. Each chunk has its own softmax, and the results of the
// chunks are merged in their order. So a query's result is the same number alone and beside others, at the end of a
// prompt or after it, and however the work is divided.
#pragma once

#include "base.h"

namespace eagleray {

inline int64_t lanes_of_block(const CAttentionParams& params) { return round_up(params.block_size, LANES); }

// Numbers of one block in the cache of a layer.
inline int64_t block_elements(const CAttentionParams& params) {
  return params.num_kv_heads * 2 * lanes_of_block(params) * params.head_dim;
}

// Split the products [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] into queries, keys and values. Queries and
// keys are normed, where there are weights [head_dim], and rotated by their position, with tables
// [positions, head_dim / 2]. Queries go to [num_tokens, num_heads * head_dim], keys and values to their slots.
template <class T>
void prepare(const Team& team, const CAttentionParams& params, const CAttentionMetadata& metadata, const float* qkv,
             const float* q_norm, const float* k_norm, float eps, const float* cos, const float* sin, T* queries,
             T* cache);

// Floats that a crew of so many threads needs as scratch for contexts up to `max_context`. The scratch begins as zeros
// and serves one phase at a time.
int64_t attend_scratch(const CAttentionParams& params, int64_t max_context, int num_threads);

// Attention of all queries over their rows' contexts -> out [num_tokens, num_heads * head_dim]. All that the queries
// see has been prepared. A token that overflowed may spoil those of its own row that are computed with it.
template <class T>
void attend(const Team& team, const CAttentionParams& params, const CAttentionMetadata& metadata, const T* queries,
            const T* cache, T* out, float* scratch);

}  // namespace eagleray

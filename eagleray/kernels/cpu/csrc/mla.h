// Multi-head latent attention (MLA) over the paged cache.
//
// A layer's cache is [blocks][block_size][rank + rotated_dim]: for each token the normalized latent, then the rotated
// part of the key, which all heads share. A head's keys and values are products of the latents with two matrices of the
// head, but they are never computed. Every query is multiplied with the matrix of its head's keys instead ("absorbed"),
// so that it sees the latents themselves, and the weighted sum of latents with the matrix of the values. So a token's
// numbers come from the same operations in the same order, whether it is decoded or part of a prompt.
//
// The attention over the latents has one key for all heads. Its rows are those of a token's heads, divided into tasks
// and cut into chunks at fixed positions as those of `attend`.
#pragma once

#include "attention.h"

namespace eagleray {

// `CMLAScratch` with a typed pointer.
template <class T>
struct MLAScratch {
  float* splits;
  T* latents;
  int64_t max_tokens;
};

// The inputs of a layer, and the tables of rotations [positions, rotated_dim / 2].
struct MLAInputs {
  const float* queries;  // [num_tokens, num_heads, plain_dim + rotated_dim]
  const float* latents;  // [num_tokens, rank + rotated_dim]
  const float *cos, *sin;
};

// Attention of all queries over their rows' contexts -> out [num_tokens, num_heads, value_dim]. `prepared` is memory for
// queries. All threads of the team call it.
template <class T>
void attend_mla(Team& team, const CMLAParams& params, const CAttentionMetadata& metadata, const MLAInputs& inputs,
                T* prepared, T* cache, T* out, const MLAScratch<T>& scratch);

// ---- its phases

// Write the tokens' latents to the cache: normalized, with the rotated part of the key. Round the queries to `prepared`
// [num_tokens, num_heads, plain_dim + rotated_dim], and rotate their rotated part.
template <class T>
void prepare_mla(const Shard& shard, const CMLAParams& params, const CAttentionMetadata& metadata,
                 const MLAInputs& inputs, T* prepared, T* cache);

// The number of floats that `attend_latents` needs, see `attend_scratch`.
int64_t attend_latents_scratch(const CMLAParams& params, int64_t max_context, int num_threads);

// latents [num_tokens, num_heads, rank]: the absorbed queries, which are replaced by the weighted sums of the latents
// that they see.
template <class T>
void attend_latents(const Shard& shard, const CMLAParams& params, const CAttentionMetadata& metadata,
                    const T* prepared, const T* cache, T* latents, float* splits);

}  // namespace eagleray

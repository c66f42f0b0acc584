// Mixture of experts: the weighted sum of the outputs of each token's experts.
//
// A pair is a token and one of its experts. A slot (always an expert slot in these files) holds the weights of one
// expert; an expert may be in several slots, or on another rank. The pairs of a slot are computed together, in order of
// their tokens. A token's sum runs over its experts from the most to the least probable, so it does not depend on other
// tokens.
#pragma once

#include "base.h"
#include "product.h"
#include "routing.h"

namespace eagleray {

// Find the slots [num_tokens, top_k] of the experts `ids`, for the tokens first_row, first_row + 1, ... of a batch.
void find_slots(const CExpertSlotMap& slot_map, const int32_t* ids, int64_t first_row, int64_t num_tokens,
                int64_t top_k, int32_t* slots);

// The pairs that have a slot, sorted by slot and then by token.
struct PairsBySlot {
  int32_t* offsets;    // [num_slots + 1] the positions of slot s are offsets[s], ..., offsets[s + 1] - 1
  int32_t* tokens;     // [num_tokens * top_k] the token of each position
  int32_t* positions;  // [num_tokens, top_k] the position of each pair, -1: no slot; may be the array of the slots
};

// slots: [num_tokens, top_k], -1: on another rank. One thread calls it, because the work is small.
void group_pairs(const int32_t* slots, int64_t num_tokens, int64_t top_k, int64_t num_slots, const PairsBySlot& pairs);

// hidden [num_tokens, size] += the sum of each token's rows of outputs [num_tokens * top_k, size], which are at
// `positions` [num_tokens, top_k] and are multiplied by `weights` [num_tokens, top_k]. A token's positions that are -1
// follow its others. The shards divide tokens and columns.
void combine(const Shard& shard, const float* outputs, const int32_t* positions, const float* weights,
             int64_t num_tokens, int64_t top_k, int64_t size, float* hidden, int64_t stride);

// The number of bytes of scratch for `max_tokens` tokens. A batch of more tokens is computed in parts, each of which
// reads the weights again; the results are the same.
template <class T>
int64_t experts_scratch_size(const CExperts& experts, int64_t top_k, int64_t max_tokens);

struct ExpertScratch {
  void* memory;  // experts_scratch_size(experts, top_k, max_tokens) bytes, where a multiple of 64 begins
  int64_t max_tokens;
};

// The hidden states that the experts compute.
template <class T>
struct ExpertRows {
  int64_t count;
  const T* x;  // [count, experts.hidden], 4-byte aligned; if that is odd, a zero follows each row of Bf16
  int64_t x_stride;
};

// counts: [num_experts], to which the number of tokens of each expert is added, or null. All threads call it.
template <class T>
void compute_experts(Team& team, const CRouterParams& router, const CExperts& experts, const CExpertSlotMap& slot_map,
                     const ExpertRows<T>& rows, const CRoutedTokens& routed, int64_t* counts,
                     const ExpertScratch& scratch);

}  // namespace eagleray

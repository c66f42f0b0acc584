// Mixture of experts: what the experts of some tokens compute, and its sum.
//
// A pair is a token and one of its experts. A slot is a place for an expert's weights; of all experts some may be
// elsewhere, in another process, and some in several slots. The pairs of a slot are computed together, in order of
// their tokens; a token's sum runs over its experts from the likeliest to the least likely, so it does not depend on
// other tokens.
#pragma once

#include "base.h"
#include "product.h"
#include "routing.h"

namespace eagleray {

// slots [num_tokens, top_k] of the experts `ids`, for the rows first_row, first_row + 1, ... of a batch.
void find_slots(const CExpertSlotMap& slot_map, const int32_t* ids, int64_t first_row, int64_t num_tokens,
                int64_t top_k, int32_t* slots);

// The pairs sorted by slot, and then by token; those without a slot are left out.
struct Groups {
  int32_t* offsets;  // [num_slots + 1] the places of slot s are offsets[s], ..., offsets[s + 1] - 1
  int32_t* tokens;   // [num_tokens * top_k] the token of each place
  int32_t* places;   // [num_tokens, top_k] the place of each pair, or -1; may be `slots`
};

// slots: [num_tokens, top_k], -1: none. One thread does it: it is little.
void group(const int32_t* slots, int64_t num_tokens, int64_t top_k, int64_t num_slots, const Groups& groups);

// hidden [num_tokens, size] += the sum of each token's rows of outputs [num_tokens * top_k, size], which `places` finds
// and `weights` [num_tokens, top_k] multiplies. A token's places that are -1 are behind its others. The threads divide
// tokens and columns.
void combine(const Team& team, const float* outputs, const int32_t* places, const float* weights, int64_t num_tokens,
             int64_t top_k, int64_t size, float* hidden, int64_t stride);

// Bytes of memory to work in. A batch of more tokens is computed in parts, each of which reads the weights again; the
// numbers are the same.
template <class T>
int64_t experts_scratch_size(const CExperts& experts, int64_t top_k, int64_t max_tokens);

struct ExpertScratch {
  void* memory;  // experts_scratch_size(experts, top_k, max_tokens) bytes, where a multiple of 64 begins
  int64_t max_tokens;
};

// What goes through the experts. Strides are in elements.
template <class T>
struct ExpertRows {
  int64_t count;
  const T* x;  // [count, experts.hidden], 4-byte aligned; if that is odd, a zero follows each row of Bf16
  int64_t x_stride;
};

// counts: [num_experts], to which the number of tokens of each is added; or null. All threads of the crew call.
template <class T>
void compute_experts(Crew& crew, const CRouterParams& router, const CExperts& experts, const CExpertSlotMap& slot_map,
                     const ExpertRows<T>& rows, const CRoutedTokens& routed, int64_t* counts,
                     const ExpertScratch& scratch);

}  // namespace eagleray

// Mixture of experts: which experts a token goes through, and the sum of what they compute.
//
// A pair is a token and one of its experts. The pairs of an expert are computed together, in order of their tokens; a
// token's sum runs over its experts from the likeliest to the least likely, so it does not depend on other tokens.
#pragma once

#include "base.h"
#include "product.h"

namespace eagleray {

// scores: [num_tokens, num_experts], rows `stride` apart -> ids and weights [num_tokens, top_k] of the highest, in
// descending order, the lower id first among equals. The weights are probabilities (softmax over all experts), which
// `renormalize` divides by their sum; in the end they are rounded to T. Where the highest score is NaN or infinite, the
// weights are NaN and the ids valid. The threads divide the tokens.
template <class T>
void route(const Team& team, const float* scores, int64_t stride, int64_t num_tokens, int64_t num_experts,
           int64_t top_k, bool renormalize, int32_t* ids, float* weights);

// The pairs sorted by expert, and then by token.
struct Groups {
  int32_t* offsets;  // [num_experts + 1] the places of expert e are offsets[e], ..., offsets[e + 1] - 1
  int32_t* tokens;   // [num_tokens * top_k] the token of each place
  int32_t* places;   // [num_tokens, top_k] the place of each pair
};

// One thread does it: it is little.
void group(const int32_t* ids, int64_t num_tokens, int64_t top_k, int64_t num_experts, const Groups& groups);

// hidden [num_tokens, size] += the sum of each token's rows of outputs [num_tokens * top_k, size], which `places` finds
// and `weights` [num_tokens, top_k] multiplies. The threads divide tokens and columns.
void combine(const Team& team, const float* outputs, const int32_t* places, const float* weights, int64_t num_tokens,
             int64_t top_k, int64_t size, float* hidden, int64_t stride);

template <class T>
struct Experts {
  int64_t num_experts, top_k;
  int64_t hidden;              // size of a token's row
  int64_t inner;               // features of an expert, or of this rank's share of it
  const T* const* gate_up;     // by expert, packed by `pack_gate_up`
  const T* const* down;        // by expert, packed by `pack`
  bool renormalize;
  bool round_weights;          // to T
};

// Bytes of memory to work in. A batch of more tokens is computed in parts, each of which reads the weights again; the
// numbers are the same.
template <class T>
int64_t experts_scratch_size(const Experts<T>& experts, int64_t max_tokens);

struct ExpertScratch {
  void* memory;  // experts_scratch_size(experts, max_tokens) bytes, where a multiple of 64 begins
  int64_t max_tokens;
};

// What goes through the experts. Strides are in elements.
template <class T>
struct ExpertTokens {
  int64_t count;
  const T* x;           // [count, experts.hidden], 4-byte aligned; if that is odd, a zero follows each row of Bf16
  int64_t x_stride;
  const float* scores;  // [count, num_experts], the router's
  int64_t scores_stride;
  float* hidden;        // [count, experts.hidden], to which the result is added
  int64_t hidden_stride;
  int32_t* ids;         // [count, top_k], to which the chosen experts are written
};

// counts: [num_experts], to which the number of tokens of each is added; or null. All threads of the crew call.
template <class T>
void compute_experts(Crew& crew, const Experts<T>& experts, const ExpertTokens<T>& tokens, int64_t* counts,
                     const ExpertScratch& scratch);

}  // namespace eagleray

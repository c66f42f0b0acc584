// Which experts compute a token, and with what weights. `routing.py` has the same in plain torch, with its sources.
#pragma once

#include "base.h"

namespace eagleray {

enum class Scoring : int64_t { softmax, sigmoid };

enum class GroupScore : int64_t { highest, two_highest };

// How experts are chosen and weighed. `abi.py` mirrors it.
struct Mixture {
  int64_t num_experts, top_k;
  Scoring scoring;               // what makes probabilities of scores
  const float* correction_bias;  // [num_experts] added to the probabilities for the choice alone; null: none
  int64_t num_groups;            // consecutive experts are a group, and groups are of one size
  int64_t top_groups;            // only experts of the best so many groups are candidates; they have top_k or more
  GroupScore group_score;        // what makes a group good: its best expert, or the sum of its two best
  int64_t renormalize;           // divide the weights of a token's experts by their sum
  float renormalize_eps;         // added to that sum
  float scale;                   // of the weights, in the end
  int64_t round_weights;         // then to the model's type
};

// scores: [num_tokens, num_experts], rows `stride` apart -> ids and weights [num_tokens, top_k] of the experts by what
// they are chosen, in descending order, the lower id first among equals. In the end the weights are rounded to T. Where
// the highest score is NaN or infinite, the weights of a softmax are NaN and the ids valid. The threads divide the
// tokens.
template <class T>
void route(const Team& team, const Mixture& mixture, const float* scores, int64_t stride, int64_t num_tokens,
           int32_t* ids, float* weights);

}  // namespace eagleray

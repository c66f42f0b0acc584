// The choice of the experts that compute a token, and their weights, as defined in kernels/torch/routing.py.
#pragma once

#include "base.h"

namespace eagleray {

// scores [num_tokens, num_experts], rows `stride` apart -> ids and weights [num_tokens, top_k] of the chosen experts,
// in descending order of the numbers by which they are chosen, the lower id first among equals. Finally the weights
// are rounded to T. If a token's highest score is NaN or infinite, the weights of a softmax are NaN and the ids are
// valid. The shards divide the tokens.
template <class T>
void route(const Shard& shard, const CRouterParams& router, const float* scores, int64_t stride, int64_t num_tokens,
           int32_t* ids, float* weights);

}  // namespace eagleray

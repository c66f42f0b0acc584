// Which experts compute a token, and with what weights. `routing.py` has the same in plain torch, with its sources.
#pragma once

#include "base.h"

namespace eagleray {

// scores: [num_tokens, num_experts], rows `stride` apart -> ids and weights [num_tokens, top_k] of the experts by what
// they are chosen, in descending order, the lower id first among equals. In the end the weights are rounded to T. Where
// the highest score is NaN or infinite, the weights of a softmax are NaN and the ids valid. The threads divide the
// tokens.
template <class T>
void route(const Team& team, const CRouterParams& router, const float* scores, int64_t stride, int64_t num_tokens,
           int32_t* ids, float* weights);

}  // namespace eagleray

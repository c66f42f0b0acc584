// Mixtures of experts for tokens that were routed elsewhere.
#pragma once

#include "experts.h"

namespace eagleray {

// The expert slot of each pair: slots [count, top_k], -1: on another rank.
struct SlottedRows {
  const int32_t* slots;
  int64_t top_k;
};

// outputs: [count, top_k, experts.hidden] the output of each pair's expert, zeros without a slot. All threads call it.
template <class T>
void compute_pairs(Team& team, const CExperts& experts, const ExpertRows<T>& rows, const SlottedRows& slotted,
                   float* outputs, const ExpertScratch& scratch);

// hidden [count, experts.hidden] += the sum of each token's outputs, multiplied by weights [count, top_k], in order.
// All threads call it.
template <class T>
void sum_pairs(Team& team, const CExperts& experts, const ExpertRows<T>& rows, const SlottedRows& slotted,
               const float* weights, float* hidden, const ExpertScratch& scratch);

}  // namespace eagleray

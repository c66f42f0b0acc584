// What experts compute of rows that were routed by others.
#pragma once

#include "experts.h"

namespace eagleray {

// Pairs that were routed elsewhere: slots [count, top_k], -1: none.
struct SlottedRows {
  const int32_t* slots;
  int64_t top_k;
};

// outputs: [count, top_k, experts.hidden] what each pair's expert computes; zeros without a slot. All threads call.
template <class T>
void compute_pairs(Crew& crew, const CExperts& experts, const ExpertRows<T>& rows, const SlottedRows& slotted,
                   float* outputs, const ExpertScratch& scratch);

// hidden [count, experts.hidden] += the sum of each row's pairs, multiplied by weights [count, top_k], in order. All
// threads call.
template <class T>
void sum_pairs(Crew& crew, const CExperts& experts, const ExpertRows<T>& rows, const SlottedRows& slotted,
               const float* weights, float* hidden, const ExpertScratch& scratch);

}  // namespace eagleray

// What the experts of some rows are computed in, step by step: pairs are grouped, their products listed and multiplied,
// and each row's outputs summed up.
#pragma once

#include <algorithm>

#include "experts.h"

namespace eagleray {

// ---- memory

// Cuts memory into arrays that begin at multiples of 64 bytes.
struct Cutter {
  char* base;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    int64_t begin = used;
    used += round_up(count * int64_t(sizeof(T)), 64);
    return base ? reinterpret_cast<T*>(base + begin) : nullptr;
  }
};

template <class T>
struct Workspace {
  int64_t top_k;
  float* weights;          // [max_tokens, top_k]
  Groups groups;
  Product<T>* products;    // [2, active slots]
  int64_t inner_stride;
  T* inner;                // [max_tokens * top_k, inner_stride]
  float* outputs;          // [max_tokens * top_k, hidden]
  int64_t size;

  Workspace(const CExperts& experts, int64_t top_k, const ExpertScratch& scratch) : top_k(top_k) {
    Cutter cutter{static_cast<char*>(scratch.memory)};
    int64_t num_pairs = scratch.max_tokens * top_k;
    weights = cutter.template take<float>(num_pairs);
    groups.offsets = cutter.template take<int32_t>(experts.num_slots + 1);
    groups.tokens = cutter.template take<int32_t>(num_pairs);
    groups.places = cutter.template take<int32_t>(num_pairs);
    products = cutter.template take<Product<T>>(2 * experts.num_slots);
    inner_stride = round_up(experts.inner, PAIR<T>);
    inner = cutter.template take<T>(num_pairs * inner_stride);
    outputs = cutter.template take<float>(num_pairs * experts.hidden);
    size = cutter.used;
  }
};

// ---- products

inline int64_t count_active(const int32_t* offsets, int64_t num_slots) {
  int64_t count = 0;
  for (int64_t slot = 0; slot < num_slots; slot++) count += offsets[slot] < offsets[slot + 1];
  return count;
}

// The products of the slots that have tokens: all of gate and up, then all of down.
template <class T>
void list_products(const CExperts& experts, const ExpertRows<T>& rows, const Workspace<T>& workspace) {
  const int32_t* offsets = workspace.groups.offsets;
  Product<T>* first = workspace.products;
  Product<T>* second = first + count_active(offsets, experts.num_slots);
  for (int64_t slot = 0; slot < experts.num_slots; slot++) {
    int64_t begin = offsets[slot], count = offsets[slot + 1] - begin;
    if (count == 0) continue;
    auto gate_up = static_cast<const T*>(experts.gate_up[slot]), down = static_cast<const T*>(experts.down[slot]);
    T* inner = workspace.inner + begin * workspace.inner_stride;
    float* output = workspace.outputs + begin * experts.hidden;
    const float* gate_up_bias = experts.gate_up_bias ? experts.gate_up_bias[slot] : nullptr;
    const float* down_bias = experts.down_bias ? experts.down_bias[slot] : nullptr;
    *first++ = {rows.x, rows.x_stride, workspace.groups.tokens + begin, count, gate_up, 2 * experts.inner,
                experts.hidden, gate_up_bias, experts.ending, experts.swiglu, inner, workspace.inner_stride};
    *second++ = {inner, workspace.inner_stride, nullptr, count, down, experts.hidden, experts.inner,
                 down_bias, ENDING_STORE, {}, output, experts.hidden};
  }
}

// As a product wants it: a zero behind each row that has half a pair left.
template <class T>
void close_rows(int64_t size, int64_t stride, int64_t num_rows, T* rows) {
  for (int64_t row = 0; size < stride && row < num_rows; row++) rows[row * stride + size] = from_float<T>(0);
}

// One thread does it.
template <class T>
void prepare_products(const CExperts& experts, const ExpertRows<T>& rows, const int32_t* slots,
                      const Workspace<T>& workspace) {
  group(slots, rows.count, workspace.top_k, experts.num_slots, workspace.groups);
  list_products(experts, rows, workspace);
  close_rows(experts.inner, workspace.inner_stride, rows.count * workspace.top_k, workspace.inner);
}

template <class T>
void multiply_experts(Crew& crew, const CExperts& experts, const Workspace<T>& workspace) {
  auto num_active = [&] { return count_active(workspace.groups.offsets, experts.num_slots); };
  crew.each([&](Team team) { multiply_all(team, workspace.products, num_active()); });
  crew.each([&](Team team) { multiply_all(team, workspace.products + num_active(), num_active()); });
}

// As `combine` wants it: the pairs of each token that have a place before those that have none.
inline void close_gaps(int64_t num_tokens, int64_t top_k, int32_t* places, float* weights) {
  for (int64_t token = 0; token < num_tokens; token++, places += top_k, weights += top_k) {
    int64_t kept = 0;
    for (int64_t pair = 0; pair < top_k; pair++) {
      if (places[pair] < 0) continue;
      places[kept] = places[pair];
      weights[kept++] = weights[pair];
    }
    std::fill(places + kept, places + top_k, -1);
  }
}

template <class T>
void combine_rows(Crew& crew, const CExperts& experts, int64_t count, const Workspace<T>& workspace, float* hidden,
                  int64_t stride) {
  crew.each([&](Team team) {
    combine(team, workspace.outputs, workspace.groups.places, workspace.weights, count, workspace.top_k,
            experts.hidden, hidden, stride);
  });
}

// ---- parts: as many tokens as there is memory for

// visit(begin, rows) for each part, which begins with row `begin`.
template <class T, class Visit>
void for_parts(const ExpertRows<T>& rows, int64_t max_tokens, Visit&& visit) {
  int64_t num_parts = (rows.count + max_tokens - 1) / max_tokens;
  for (int64_t part = 0; part < num_parts; part++) {
    int64_t begin = rows.count * part / num_parts, end = rows.count * (part + 1) / num_parts;
    visit(begin, ExpertRows<T>{end - begin, rows.x + begin * rows.x_stride, rows.x_stride});
  }
}

}  // namespace eagleray

// The memory and the phases of a mixture of experts: pairs are grouped by slot, their products are listed and
// multiplied, and the outputs of each token are summed up.
#pragma once

#include <algorithm>

#include "experts.h"

namespace eagleray {

// ---- memory

// Divides memory into arrays that begin at multiples of 64 bytes. Without memory it only counts the bytes.
struct Arena {
  char* base;
  int64_t used = 0;

  template <class T>
  T* allocate(int64_t count) {
    int64_t begin = used;
    used += round_up(count * int64_t(sizeof(T)), 64);
    return base ? reinterpret_cast<T*>(base + begin) : nullptr;
  }
};

template <class T>
struct Workspace {
  int64_t top_k;
  float* weights;          // [max_tokens, top_k]
  PairsBySlot pairs;
  Product<T>* products;    // [2, active slots]
  int64_t inner_stride;
  T* inner;                // [max_tokens * top_k, inner_stride]
  float* outputs;          // [max_tokens * top_k, hidden]
  int64_t size;

  Workspace(const CExperts& experts, int64_t top_k, const ExpertScratch& scratch) : top_k(top_k) {
    Arena arena{static_cast<char*>(scratch.memory)};
    int64_t num_pairs = scratch.max_tokens * top_k;
    weights = arena.template allocate<float>(num_pairs);
    pairs.offsets = arena.template allocate<int32_t>(experts.num_slots + 1);
    pairs.tokens = arena.template allocate<int32_t>(num_pairs);
    pairs.positions = arena.template allocate<int32_t>(num_pairs);
    products = arena.template allocate<Product<T>>(2 * experts.num_slots);
    inner_stride = round_up(experts.inner, PAIR<T>);
    inner = arena.template allocate<T>(num_pairs * inner_stride);
    outputs = arena.template allocate<float>(num_pairs * experts.hidden);
    size = arena.used;
  }
};

// ---- products

inline int64_t count_active(const int32_t* offsets, int64_t num_slots) {
  int64_t count = 0;
  for (int64_t slot = 0; slot < num_slots; slot++) count += offsets[slot] < offsets[slot + 1];
  return count;
}

// List the products of the slots that have tokens: first all of gate and up, then all of down.
template <class T>
void list_products(const CExperts& experts, const ExpertRows<T>& rows, const Workspace<T>& workspace) {
  const int32_t* offsets = workspace.pairs.offsets;
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
    *first++ = {rows.x, rows.x_stride, workspace.pairs.tokens + begin, count, gate_up, 2 * experts.inner,
                experts.hidden, gate_up_bias, experts.epilogue, experts.swiglu, inner, workspace.inner_stride,
                experts.gate_up_grouping};
    *second++ = {inner, workspace.inner_stride, nullptr, count, down, experts.hidden, experts.inner,
                 down_bias, EPILOGUE_STORE, {}, output, experts.hidden, experts.down_grouping};
  }
}

// Write a zero after each row that ends in half a pair, as products require.
template <class T>
void pad_rows(int64_t size, int64_t stride, int64_t num_rows, T* rows) {
  for (int64_t row = 0; size < stride && row < num_rows; row++) rows[row * stride + size] = from_float<T>(0);
}

// One thread calls it.
template <class T>
void prepare_products(const CExperts& experts, const ExpertRows<T>& rows, const int32_t* slots,
                      const Workspace<T>& workspace) {
  group_pairs(slots, rows.count, workspace.top_k, experts.num_slots, workspace.pairs);
  list_products(experts, rows, workspace);
  pad_rows(experts.inner, workspace.inner_stride, rows.count * workspace.top_k, workspace.inner);
}

template <class T>
void multiply_experts(Team& team, const CExperts& experts, const Workspace<T>& workspace) {
  auto num_active = [&] { return count_active(workspace.pairs.offsets, experts.num_slots); };
  team.for_each_shard([&](Shard shard) { multiply_all(shard, workspace.products, num_active()); });
  team.for_each_shard([&](Shard shard) { multiply_all(shard, workspace.products + num_active(), num_active()); });
}

// Move the pairs of each token that have a position before its others, as `combine` requires.
inline void compact_pairs(int64_t num_tokens, int64_t top_k, int32_t* positions, float* weights) {
  for (int64_t token = 0; token < num_tokens; token++, positions += top_k, weights += top_k) {
    int64_t kept = 0;
    for (int64_t pair = 0; pair < top_k; pair++) {
      if (positions[pair] < 0) continue;
      positions[kept] = positions[pair];
      weights[kept++] = weights[pair];
    }
    std::fill(positions + kept, positions + top_k, -1);
  }
}

template <class T>
void combine_rows(Team& team, const CExperts& experts, int64_t count, const Workspace<T>& workspace, float* hidden,
                  int64_t stride) {
  team.for_each_shard([&](Shard shard) {
    combine(shard, workspace.outputs, workspace.pairs.positions, workspace.weights, count, workspace.top_k,
            experts.hidden, hidden, stride);
  });
}

// ---- parts: batches of at most `max_tokens` tokens

// Call visit(begin, rows) for each part; `begin` is its first token.
template <class T, class Visit>
void for_parts(const ExpertRows<T>& rows, int64_t max_tokens, Visit&& visit) {
  int64_t num_parts = (rows.count + max_tokens - 1) / max_tokens;
  for (int64_t part = 0; part < num_parts; part++) {
    int64_t begin = rows.count * part / num_parts, end = rows.count * (part + 1) / num_parts;
    visit(begin, ExpertRows<T>{end - begin, rows.x + begin * rows.x_stride, rows.x_stride});
  }
}

}  // namespace eagleray

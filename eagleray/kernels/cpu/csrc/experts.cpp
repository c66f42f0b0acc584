#include "experts.h"

#include <algorithm>

#include "experts_workspace.h"
#include "rows.h"

namespace eagleray {
namespace {

// Up to this many tokens, one thread routes faster than the team needs for a phase.
constexpr int64_t FEW_TOKENS = 8;
// The number of columns that a thread sums up at a time.
constexpr int64_t COLUMNS = 256;

// The number of a token's pairs that have a position. They precede the others.
int64_t count_computed(const int32_t* positions, int64_t top_k) {
  while (top_k > 0 && positions[top_k - 1] < 0) top_k--;
  return top_k;
}

// ---- routed tokens

// The tokens from `begin` on.
CRoutedTokens part_of(CRoutedTokens routed, int64_t begin, int64_t top_k) {
  routed.scores += begin * routed.scores_stride;
  routed.hidden += begin * routed.hidden_stride;
  routed.ids += begin * top_k;
  CExpertTrace& trace = routed.trace;
  if (trace.ids) trace.ids = static_cast<char*>(trace.ids) + begin * trace.stride * (trace.is_wide ? 2 : 1);
  return routed;
}

// Write the ids of the tokens that this thread has routed.
template <class Id>
void write_trace(Span own, const int32_t* ids, int64_t top_k, const CExpertTrace& trace) {
  for (int64_t token = own.begin; token < own.end; token++)
    std::copy_n(ids + token * top_k, top_k, static_cast<Id*>(trace.ids) + token * trace.stride);
}

template <class T>
void route_rows(const Shard& shard, const CRouterParams& router, int64_t count, const CRoutedTokens& routed,
                float* weights) {
  auto route_rounded = router.round_weights ? route<T> : route<float>;
  route_rounded(shard, router, routed.scores, routed.scores_stride, count, routed.ids, weights);
  if (!routed.trace.ids) return;
  auto write = routed.trace.is_wide ? write_trace<uint16_t> : write_trace<uint8_t>;
  write(range_of(shard, count), routed.ids, router.top_k, routed.trace);  // `route` divides tokens as this does
}

// Prepare the products where expert e is in slot e. One thread calls it.
template <class T>
void prepare_routed(const CExperts& experts, const ExpertRows<T>& rows, const int32_t* ids, int64_t* counts,
                    const Workspace<T>& workspace) {
  const int32_t* offsets = workspace.pairs.offsets;
  prepare_products(experts, rows, ids, workspace);
  for (int64_t slot = 0; counts && slot < experts.num_slots; slot++) counts[slot] += offsets[slot + 1] - offsets[slot];
}

// Prepare the products where `slot_map` has the slots. `begin` is the first token of the part. One thread calls it.
template <class T>
void prepare_mapped(const CExperts& experts, const CExpertSlotMap& slot_map, int64_t begin, const ExpertRows<T>& rows,
                    const int32_t* ids, int64_t* counts, const Workspace<T>& workspace) {
  int64_t top_k = workspace.top_k;
  int32_t* positions = workspace.pairs.positions;
  find_slots(slot_map, ids, begin, rows.count, top_k, positions);
  prepare_products(experts, rows, positions, workspace);
  compact_pairs(rows.count, top_k, positions, workspace.weights);
  for (int64_t pair = 0; counts && pair < rows.count * top_k; pair++) counts[ids[pair]]++;
}

}  // namespace

void find_slots(const CExpertSlotMap& slot_map, const int32_t* ids, int64_t first_row, int64_t num_tokens,
                int64_t top_k, int32_t* slots) {
  for (int64_t token = 0; token < num_tokens; token++)
    for (int64_t pair = token * top_k; pair < (token + 1) * top_k; pair++) {
      int64_t id = ids[pair], copy = (first_row + token) % slot_map.num_copies[id];
      slots[pair] = slot_map.table[id * slot_map.max_copies + copy];
    }
}

void group_pairs(const int32_t* slots, int64_t num_tokens, int64_t top_k, int64_t num_slots, const PairsBySlot& pairs) {
  int64_t num_pairs = num_tokens * top_k;
  int32_t* next = pairs.offsets;  // while positions are assigned: the position of each slot's next pair
  std::fill_n(pairs.offsets, num_slots + 1, 0);
  for (int64_t pair = 0; pair < num_pairs; pair++)
    if (slots[pair] >= 0) pairs.offsets[slots[pair] + 1]++;
  for (int64_t slot = 0; slot < num_slots; slot++) pairs.offsets[slot + 1] += pairs.offsets[slot];
  for (int64_t token = 0; token < num_tokens; token++)
    for (int64_t pair = token * top_k; pair < (token + 1) * top_k; pair++) {
      int32_t position = slots[pair] < 0 ? -1 : next[slots[pair]]++;
      if (position >= 0) pairs.tokens[position] = int32_t(token);
      pairs.positions[pair] = position;
    }
  std::copy_backward(next, next + num_slots, next + num_slots + 1);  // each is now where the next slot begins
  pairs.offsets[0] = 0;
}

void combine(const Shard& shard, const float* outputs, const int32_t* positions, const float* weights,
             int64_t num_tokens, int64_t top_k, int64_t size, float* hidden, int64_t stride) {
  int64_t parts = (size + COLUMNS - 1) / COLUMNS;
  Span own = range_of(shard, num_tokens * parts);
  for (int64_t index = own.begin; index < own.end; index++) {
    int64_t token = index / parts, begin = index % parts * COLUMNS;
    const int32_t* rows = positions + token * top_k;
    const float* factors = weights + token * top_k;
    const int64_t count = count_computed(rows, top_k);
    float* to = hidden + token * stride + begin;
    for_vectors(std::min(COLUMNS, size - begin), [&](int64_t i, auto lanes) {
      Floats total{};
      for (int64_t pair = 0; pair < count; pair++)
        total += factors[pair] * load_some(outputs + rows[pair] * size + begin + i, lanes);
      store_some(to + i, load_some(to + i, lanes) + total, lanes);
    });
  }
}

template <class T>
int64_t experts_scratch_size(const CExperts& experts, int64_t top_k, int64_t max_tokens) {
  return Workspace<T>(experts, top_k, ExpertScratch{nullptr, max_tokens}).size;
}

template <class T>
void compute_experts(Team& team, const CRouterParams& router, const CExperts& experts, const CExpertSlotMap& slot_map,
                     const ExpertRows<T>& all, const CRoutedTokens& whole, int64_t* counts,
                     const ExpertScratch& scratch) {
  Workspace<T> workspace(experts, router.top_k, scratch);
  for_parts(all, scratch.max_tokens, [&](int64_t begin, const ExpertRows<T>& rows) {
    CRoutedTokens routed = part_of(whole, begin, router.top_k);
    bool is_small = rows.count <= FEW_TOKENS;
    if (!is_small)
      team.for_each_shard([&](Shard shard) { route_rows<T>(shard, router, rows.count, routed, workspace.weights); });
    team.run_once([&] {
      if (is_small) route_rows<T>(Shard{0, 1}, router, rows.count, routed, workspace.weights);
      if (slot_map.table) prepare_mapped(experts, slot_map, begin, rows, routed.ids, counts, workspace);
      else prepare_routed(experts, rows, routed.ids, counts, workspace);
    });
    multiply_experts(team, experts, workspace);
    combine_rows(team, experts, rows.count, workspace, routed.hidden, routed.hidden_stride);
  });
}

template int64_t experts_scratch_size<float>(const CExperts&, int64_t, int64_t);
template int64_t experts_scratch_size<Bf16>(const CExperts&, int64_t, int64_t);
template void compute_experts(Team&, const CRouterParams&, const CExperts&, const CExpertSlotMap&,
                              const ExpertRows<float>&, const CRoutedTokens&, int64_t*, const ExpertScratch&);
template void compute_experts(Team&, const CRouterParams&, const CExperts&, const CExpertSlotMap&,
                              const ExpertRows<Bf16>&, const CRoutedTokens&, int64_t*, const ExpertScratch&);

}  // namespace eagleray

using namespace eagleray;

extern "C" {

void er_group_pairs(const int32_t* slots, int64_t num_tokens, int64_t top_k, int64_t num_slots, int32_t* offsets,
                    int32_t* tokens, int32_t* positions) {
  group_pairs(slots, num_tokens, top_k, num_slots, PairsBySlot{offsets, tokens, positions});
}

void er_combine(const float* outputs, const int32_t* positions, const float* weights, int64_t num_tokens, int64_t top_k,
                int64_t size, float* hidden, int64_t stride, int num_threads) {
  run_phase(num_threads, [&](Shard shard) {
    combine(shard, outputs, positions, weights, num_tokens, top_k, size, hidden, stride);
  });
}

int64_t er_experts_scratch_size(const CExperts* experts, int64_t top_k, int64_t max_tokens, int dtype) {
  return dtype == 0 ? experts_scratch_size<float>(*experts, top_k, max_tokens)
                    : experts_scratch_size<Bf16>(*experts, top_k, max_tokens);
}

void er_compute_experts(const CRouterParams* router, const CExperts* experts, const CExpertSlotMap* slot_map,
                        const void* x, int64_t x_stride, int64_t num_tokens, const CRoutedTokens* routed,
                        int64_t* counts, void* scratch, int64_t max_tokens, int dtype, int num_threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    ExpertRows<T> rows{num_tokens, static_cast<const T*>(x), x_stride};
    run_team(num_threads, [&](Team& team) {
      compute_experts(team, *router, *experts, *slot_map, rows, *routed, counts, ExpertScratch{scratch, max_tokens});
    });
  });
}

}  // extern "C"

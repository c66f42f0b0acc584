#include "experts.h"

#include <algorithm>

#include "experts_workspace.h"
#include "rows.h"

namespace eagleray {
namespace {

// Up to so many tokens one thread routes sooner than all could meet.
constexpr int64_t FEW_TOKENS = 8;
// Columns that a thread sums up at a time.
constexpr int64_t COLUMNS = 256;

// How many of a token's pairs have a place, which come first.
int64_t count_placed(const int32_t* places, int64_t top_k) {
  while (top_k > 0 && places[top_k - 1] < 0) top_k--;
  return top_k;
}

// ---- routed rows

// The rows from number `begin` on.
CRoutedTokens part_of(CRoutedTokens routed, int64_t begin, int64_t top_k) {
  routed.scores += begin * routed.scores_stride;
  routed.hidden += begin * routed.hidden_stride;
  routed.ids += begin * top_k;
  CExpertTrace& trace = routed.trace;
  if (trace.ids) trace.ids = static_cast<char*>(trace.ids) + begin * trace.stride * (trace.is_wide ? 2 : 1);
  return routed;
}

// The rows that this thread has routed.
template <class Id>
void write_trace(Span own, const int32_t* ids, int64_t top_k, const CExpertTrace& trace) {
  for (int64_t token = own.begin; token < own.end; token++)
    std::copy_n(ids + token * top_k, top_k, static_cast<Id*>(trace.ids) + token * trace.stride);
}

template <class T>
void route_rows(const Team& team, const CRouterParams& router, int64_t count, const CRoutedTokens& routed,
                float* weights) {
  auto route_rounded = router.round_weights ? route<T> : route<float>;
  route_rounded(team, router, routed.scores, routed.scores_stride, count, routed.ids, weights);
  if (!routed.trace.ids) return;
  auto write = routed.trace.is_wide ? write_trace<uint16_t> : write_trace<uint8_t>;
  write(share(team, count), routed.ids, router.top_k, routed.trace);  // `route` divides tokens as this does
}

// One thread does it, where every expert has the slot of its number.
template <class T>
void prepare_routed(const CExperts& experts, const ExpertRows<T>& rows, const int32_t* ids, int64_t* counts,
                    const Workspace<T>& workspace) {
  const int32_t* offsets = workspace.groups.offsets;
  prepare_products(experts, rows, ids, workspace);
  for (int64_t slot = 0; counts && slot < experts.num_slots; slot++) counts[slot] += offsets[slot + 1] - offsets[slot];
}

// One thread does it. `begin`: of the part.
template <class T>
void prepare_mapped(const CExperts& experts, const CExpertSlotMap& slot_map, int64_t begin, const ExpertRows<T>& rows,
                    const int32_t* ids, int64_t* counts, const Workspace<T>& workspace) {
  int64_t top_k = workspace.top_k;
  int32_t* places = workspace.groups.places;
  find_slots(slot_map, ids, begin, rows.count, top_k, places);
  prepare_products(experts, rows, places, workspace);
  close_gaps(rows.count, top_k, places, workspace.weights);
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

void group(const int32_t* slots, int64_t num_tokens, int64_t top_k, int64_t num_slots, const Groups& groups) {
  int64_t num_pairs = num_tokens * top_k;
  int32_t* next = groups.offsets;  // the place of the next pair of each slot, until all are placed
  std::fill_n(groups.offsets, num_slots + 1, 0);
  for (int64_t pair = 0; pair < num_pairs; pair++)
    if (slots[pair] >= 0) groups.offsets[slots[pair] + 1]++;
  for (int64_t slot = 0; slot < num_slots; slot++) groups.offsets[slot + 1] += groups.offsets[slot];
  for (int64_t token = 0; token < num_tokens; token++)
    for (int64_t pair = token * top_k; pair < (token + 1) * top_k; pair++) {
      int32_t place = slots[pair] < 0 ? -1 : next[slots[pair]]++;
      if (place >= 0) groups.tokens[place] = int32_t(token);
      groups.places[pair] = place;
    }
  std::copy_backward(next, next + num_slots, next + num_slots + 1);  // each stands where the one behind it begins
  groups.offsets[0] = 0;
}

void combine(const Team& team, const float* outputs, const int32_t* places, const float* weights, int64_t num_tokens,
             int64_t top_k, int64_t size, float* hidden, int64_t stride) {
  int64_t parts = (size + COLUMNS - 1) / COLUMNS;
  Span own = share(team, num_tokens * parts);
  for (int64_t index = own.begin; index < own.end; index++) {
    int64_t token = index / parts, begin = index % parts * COLUMNS;
    const int32_t* rows = places + token * top_k;
    const float* factors = weights + token * top_k;
    const int64_t count = count_placed(rows, top_k);
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
void compute_experts(Crew& crew, const CRouterParams& router, const CExperts& experts, const CExpertSlotMap& slot_map,
                     const ExpertRows<T>& all, const CRoutedTokens& whole, int64_t* counts,
                     const ExpertScratch& scratch) {
  Workspace<T> workspace(experts, router.top_k, scratch);
  for_parts(all, scratch.max_tokens, [&](int64_t begin, const ExpertRows<T>& rows) {
    CRoutedTokens routed = part_of(whole, begin, router.top_k);
    bool are_few = rows.count <= FEW_TOKENS;
    if (!are_few) crew.each([&](Team team) { route_rows<T>(team, router, rows.count, routed, workspace.weights); });
    crew.one([&] {
      if (are_few) route_rows<T>(Team{0, 1}, router, rows.count, routed, workspace.weights);
      if (slot_map.table) prepare_mapped(experts, slot_map, begin, rows, routed.ids, counts, workspace);
      else prepare_routed(experts, rows, routed.ids, counts, workspace);
    });
    multiply_experts(crew, experts, workspace);
    combine_rows(crew, experts, rows.count, workspace, routed.hidden, routed.hidden_stride);
  });
}

template int64_t experts_scratch_size<float>(const CExperts&, int64_t, int64_t);
template int64_t experts_scratch_size<Bf16>(const CExperts&, int64_t, int64_t);
template void compute_experts(Crew&, const CRouterParams&, const CExperts&, const CExpertSlotMap&,
                              const ExpertRows<float>&, const CRoutedTokens&, int64_t*, const ExpertScratch&);
template void compute_experts(Crew&, const CRouterParams&, const CExperts&, const CExpertSlotMap&,
                              const ExpertRows<Bf16>&, const CRoutedTokens&, int64_t*, const ExpertScratch&);

}  // namespace eagleray

// ---- for what is computed outside of a program, and for tests. dtype: 0 float32, 1 bfloat16. `scratch` has room for
// `max_tokens`.

using namespace eagleray;

extern "C" {

void er_group(const int32_t* slots, int64_t num_tokens, int64_t top_k, int64_t num_slots, int32_t* offsets,
              int32_t* tokens, int32_t* places) {
  group(slots, num_tokens, top_k, num_slots, Groups{offsets, tokens, places});
}

void er_combine(const float* outputs, const int32_t* places, const float* weights, int64_t num_tokens, int64_t top_k,
                int64_t size, float* hidden, int64_t stride, int num_threads) {
  run_team(num_threads, [&](Team team) {
    combine(team, outputs, places, weights, num_tokens, top_k, size, hidden, stride);
  });
}

// Bytes.
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
    run_crew(num_threads, [&](Crew& crew) {
      compute_experts(crew, *router, *experts, *slot_map, rows, *routed, counts, ExpertScratch{scratch, max_tokens});
    });
  });
}

}  // extern "C"

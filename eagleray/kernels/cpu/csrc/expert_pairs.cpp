#include "expert_pairs.h"

#include "experts_workspace.h"

namespace eagleray {

template <class T>
void compute_pairs(Team& team, const CExperts& experts, const ExpertRows<T>& all, const SlottedRows& slotted,
                   float* outputs, const ExpertScratch& scratch) {
  Workspace<T> workspace(experts, slotted.top_k, scratch);
  size_t row_bytes = size_t(experts.hidden) * sizeof(float);
  for_parts(all, scratch.max_tokens, [&](int64_t begin, const ExpertRows<T>& rows) {
    int64_t first = begin * slotted.top_k, num_pairs = rows.count * slotted.top_k;
    team.run_once([&] { prepare_products(experts, rows, slotted.slots + first, workspace); });
    multiply_experts(team, experts, workspace);
    team.for_each_shard([&](Shard shard) {
      Span own = range_of(shard, num_pairs);
      for (int64_t pair = own.begin; pair < own.end; pair++) {
        int64_t position = workspace.pairs.positions[pair];
        float* to = outputs + (first + pair) * experts.hidden;
        if (position < 0) std::memset(to, 0, row_bytes);
        else std::memcpy(to, workspace.outputs + position * experts.hidden, row_bytes);
      }
    });
  });
}

template <class T>
void sum_pairs(Team& team, const CExperts& experts, const ExpertRows<T>& all, const SlottedRows& slotted,
               const float* weights, float* hidden, const ExpertScratch& scratch) {
  Workspace<T> workspace(experts, slotted.top_k, scratch);
  for_parts(all, scratch.max_tokens, [&](int64_t begin, const ExpertRows<T>& rows) {
    int64_t first = begin * slotted.top_k, num_pairs = rows.count * slotted.top_k;
    team.run_once([&] {
      prepare_products(experts, rows, slotted.slots + first, workspace);
      std::copy_n(weights + first, num_pairs, workspace.weights);
      compact_pairs(rows.count, slotted.top_k, workspace.pairs.positions, workspace.weights);
    });
    multiply_experts(team, experts, workspace);
    combine_rows(team, experts, rows.count, workspace, hidden + begin * experts.hidden, experts.hidden);
  });
}

template void compute_pairs(Team&, const CExperts&, const ExpertRows<float>&, const SlottedRows&, float*,
                            const ExpertScratch&);
template void compute_pairs(Team&, const CExperts&, const ExpertRows<Bf16>&, const SlottedRows&, float*,
                            const ExpertScratch&);
template void sum_pairs(Team&, const CExperts&, const ExpertRows<float>&, const SlottedRows&, const float*, float*,
                        const ExpertScratch&);
template void sum_pairs(Team&, const CExperts&, const ExpertRows<Bf16>&, const SlottedRows&, const float*, float*,
                        const ExpertScratch&);

}  // namespace eagleray

using namespace eagleray;

extern "C" {

void er_compute_pairs(const CExperts* experts, const void* x, int64_t x_stride, int64_t num_tokens,
                      const int32_t* slots, int64_t top_k, float* outputs, void* scratch, int64_t max_tokens, int dtype,
                      int num_threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    ExpertRows<T> rows{num_tokens, static_cast<const T*>(x), x_stride};
    run_team(num_threads, [&](Team& team) {
      compute_pairs(team, *experts, rows, SlottedRows{slots, top_k}, outputs, ExpertScratch{scratch, max_tokens});
    });
  });
}

void er_sum_pairs(const CExperts* experts, const void* x, int64_t x_stride, int64_t num_tokens, const int32_t* slots,
                  int64_t top_k, const float* weights, float* hidden, void* scratch, int64_t max_tokens, int dtype,
                  int num_threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    ExpertRows<T> rows{num_tokens, static_cast<const T*>(x), x_stride};
    run_team(num_threads, [&](Team& team) {
      sum_pairs(team, *experts, rows, SlottedRows{slots, top_k}, weights, hidden, ExpertScratch{scratch, max_tokens});
    });
  });
}

}  // extern "C"

#include "expert_pairs.h"

#include "experts_workspace.h"

namespace eagleray {

template <class T>
void compute_pairs(Crew& crew, const CExperts& experts, const ExpertRows<T>& all, const SlottedRows& slotted,
                   float* outputs, const ExpertScratch& scratch) {
  Workspace<T> workspace(experts, slotted.top_k, scratch);
  size_t row_bytes = size_t(experts.hidden) * sizeof(float);
  for_parts(all, scratch.max_tokens, [&](int64_t begin, const ExpertRows<T>& rows) {
    int64_t first = begin * slotted.top_k, num_pairs = rows.count * slotted.top_k;
    crew.one([&] { prepare_products(experts, rows, slotted.slots + first, workspace); });
    multiply_experts(crew, experts, workspace);
    crew.each([&](Team team) {
      Span own = share(team, num_pairs);
      for (int64_t pair = own.begin; pair < own.end; pair++) {
        int64_t place = workspace.groups.places[pair];
        float* to = outputs + (first + pair) * experts.hidden;
        if (place < 0) std::memset(to, 0, row_bytes);
        else std::memcpy(to, workspace.outputs + place * experts.hidden, row_bytes);
      }
    });
  });
}

template <class T>
void sum_pairs(Crew& crew, const CExperts& experts, const ExpertRows<T>& all, const SlottedRows& slotted,
               const float* weights, float* hidden, const ExpertScratch& scratch) {
  Workspace<T> workspace(experts, slotted.top_k, scratch);
  for_parts(all, scratch.max_tokens, [&](int64_t begin, const ExpertRows<T>& rows) {
    int64_t first = begin * slotted.top_k, num_pairs = rows.count * slotted.top_k;
    crew.one([&] {
      prepare_products(experts, rows, slotted.slots + first, workspace);
      std::copy_n(weights + first, num_pairs, workspace.weights);
      close_gaps(rows.count, slotted.top_k, workspace.groups.places, workspace.weights);
    });
    multiply_experts(crew, experts, workspace);
    combine_rows(crew, experts, rows.count, workspace, hidden + begin * experts.hidden, experts.hidden);
  });
}

template void compute_pairs(Crew&, const CExperts&, const ExpertRows<float>&, const SlottedRows&, float*,
                            const ExpertScratch&);
template void compute_pairs(Crew&, const CExperts&, const ExpertRows<Bf16>&, const SlottedRows&, float*,
                            const ExpertScratch&);
template void sum_pairs(Crew&, const CExperts&, const ExpertRows<float>&, const SlottedRows&, const float*, float*,
                        const ExpertScratch&);
template void sum_pairs(Crew&, const CExperts&, const ExpertRows<Bf16>&, const SlottedRows&, const float*, float*,
                        const ExpertScratch&);

}  // namespace eagleray

// dtype: 0 float32, 1 bfloat16. `scratch` has room for `max_tokens`.

using namespace eagleray;

extern "C" {

void er_compute_pairs(const CExperts* experts, const void* x, int64_t x_stride, int64_t num_tokens,
                      const int32_t* slots, int64_t top_k, float* outputs, void* scratch, int64_t max_tokens, int dtype,
                      int num_threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    ExpertRows<T> rows{num_tokens, static_cast<const T*>(x), x_stride};
    run_crew(num_threads, [&](Crew& crew) {
      compute_pairs(crew, *experts, rows, SlottedRows{slots, top_k}, outputs, ExpertScratch{scratch, max_tokens});
    });
  });
}

// hidden: [num_tokens, experts.hidden]
void er_sum_pairs(const CExperts* experts, const void* x, int64_t x_stride, int64_t num_tokens, const int32_t* slots,
                  int64_t top_k, const float* weights, float* hidden, void* scratch, int64_t max_tokens, int dtype,
                  int num_threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    ExpertRows<T> rows{num_tokens, static_cast<const T*>(x), x_stride};
    run_crew(num_threads, [&](Crew& crew) {
      sum_pairs(crew, *experts, rows, SlottedRows{slots, top_k}, weights, hidden, ExpertScratch{scratch, max_tokens});
    });
  });
}

}  // extern "C"

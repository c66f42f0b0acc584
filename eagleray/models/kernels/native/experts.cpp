#include "experts.h"

#include <algorithm>
#include <limits>

#include "ranking.h"
#include "rows.h"

namespace eagleray {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Up to so many tokens one thread routes sooner than all could meet.
constexpr int64_t FEW_TOKENS = 8;
// Columns that a thread sums up at a time.
constexpr int64_t COLUMNS = 256;

// The ids of the k highest, in order.
void choose(const float* scores, int64_t num_experts, int64_t k, int32_t* ids) {
  int64_t count = 0;
  for (int64_t id = 0; id < num_experts; id++) {
    int32_t own = order(scores[id]);
    if (count == k && own <= order(scores[ids[k - 1]])) continue;
    int64_t place = count < k ? count++ : k - 1;
    for (; place > 0 && own > order(scores[ids[place - 1]]); place--) ids[place] = ids[place - 1];
    ids[place] = int32_t(id);
  }
}

float sum_of_exp(const float* scores, int64_t count, float highest) {
  Floats total{};
  for_vectors(count, [&](int64_t i, auto size) {
    Floats lanes = splat(-INFINITE);
    std::memcpy(&lanes, scores + i, size * sizeof(float));
    total += exp(lanes - highest);
  });
  return sum(total);
}

template <class T>
void route_token(const float* scores, int64_t num_experts, int64_t top_k, bool renormalize, int32_t* ids,
                 float* weights) {
  choose(scores, num_experts, top_k, ids);
  float highest = scores[ids[0]];
  if (!std::isfinite(highest)) {
    std::fill_n(weights, top_k, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  float total = sum_of_exp(scores, num_experts, highest), kept = 0;
  for (int64_t slot = 0; slot < top_k; slot++) {
    weights[slot] = exp(splat(scores[ids[slot]] - highest))[0] / total;
    kept += weights[slot];
  }
  for (int64_t slot = 0; slot < top_k; slot++)
    weights[slot] = to_float(from_float<T>(renormalize ? weights[slot] / kept : weights[slot]));
}

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
  float* weights;          // [max_tokens, top_k]
  Groups groups;
  Product<T>* products;    // [2, active experts]
  int64_t inner_stride;
  T* inner;                // [max_tokens * top_k, inner_stride]
  float* outputs;          // [max_tokens * top_k, hidden]
  int64_t size;

  Workspace(const Experts<T>& experts, const ExpertScratch& scratch) {
    Cutter cutter{static_cast<char*>(scratch.memory)};
    int64_t num_pairs = scratch.max_tokens * experts.top_k;
    weights = cutter.template take<float>(num_pairs);
    groups.offsets = cutter.template take<int32_t>(experts.num_experts + 1);
    groups.tokens = cutter.template take<int32_t>(num_pairs);
    groups.places = cutter.template take<int32_t>(num_pairs);
    products = cutter.template take<Product<T>>(2 * experts.num_experts);
    inner_stride = round_up(experts.inner, PAIR<T>);
    inner = cutter.template take<T>(num_pairs * inner_stride);
    outputs = cutter.template take<float>(num_pairs * experts.hidden);
    size = cutter.used;
  }
};

// ---- products

int64_t count_active(const int32_t* offsets, int64_t num_experts) {
  int64_t count = 0;
  for (int64_t expert = 0; expert < num_experts; expert++) count += offsets[expert] < offsets[expert + 1];
  return count;
}

// The products of the experts that have tokens: all of gate and up, then all of down.
template <class T>
void list_products(const Experts<T>& experts, const ExpertTokens<T>& tokens, const Workspace<T>& workspace) {
  const int32_t* offsets = workspace.groups.offsets;
  Product<T>* first = workspace.products;
  Product<T>* second = first + count_active(offsets, experts.num_experts);
  for (int64_t expert = 0; expert < experts.num_experts; expert++) {
    int64_t begin = offsets[expert], count = offsets[expert + 1] - begin;
    if (count == 0) continue;
    T* inner = workspace.inner + begin * workspace.inner_stride;
    float* output = workspace.outputs + begin * experts.hidden;
    *first++ = {tokens.x, tokens.x_stride, workspace.groups.tokens + begin, count, experts.gate_up[expert],
                2 * experts.inner, experts.hidden, nullptr, Ending::silu, inner, workspace.inner_stride};
    *second++ = {inner, workspace.inner_stride, nullptr, count, experts.down[expert],
                 experts.hidden, experts.inner, nullptr, Ending::store, output, experts.hidden};
  }
}

// As a product wants it: a zero behind each row that has half a pair left.
template <class T>
void close_rows(int64_t size, int64_t stride, int64_t num_rows, T* rows) {
  for (int64_t row = 0; size < stride && row < num_rows; row++) rows[row * stride + size] = from_float<T>(0);
}

template <class T>
void route_tokens(const Team& team, const Experts<T>& experts, const ExpertTokens<T>& tokens, float* weights) {
  auto route_rounded = experts.round_weights ? route<T> : route<float>;
  route_rounded(team, tokens.scores, tokens.scores_stride, tokens.count, experts.num_experts, experts.top_k,
                experts.renormalize, tokens.ids, weights);
}

// One thread does it.
template <class T>
void prepare_products(const Experts<T>& experts, const ExpertTokens<T>& tokens, const Workspace<T>& workspace,
                      int64_t* counts) {
  const int32_t* offsets = workspace.groups.offsets;
  group(tokens.ids, tokens.count, experts.top_k, experts.num_experts, workspace.groups);
  list_products(experts, tokens, workspace);
  close_rows(experts.inner, workspace.inner_stride, tokens.count * experts.top_k, workspace.inner);
  for (int64_t expert = 0; counts && expert < experts.num_experts; expert++)
    counts[expert] += offsets[expert + 1] - offsets[expert];
}

// As many tokens as there is memory for.
template <class T>
void compute_part(Crew& crew, const Experts<T>& experts, const ExpertTokens<T>& tokens, int64_t* counts,
                  const Workspace<T>& workspace) {
  bool are_few = tokens.count <= FEW_TOKENS;
  if (!are_few) crew.each([&](Team team) { route_tokens(team, experts, tokens, workspace.weights); });
  crew.one([&] {
    if (are_few) route_tokens(Team{0, 1}, experts, tokens, workspace.weights);
    prepare_products(experts, tokens, workspace, counts);
  });
  auto num_active = [&] { return count_active(workspace.groups.offsets, experts.num_experts); };
  crew.each([&](Team team) { multiply_all(team, workspace.products, num_active()); });
  crew.each([&](Team team) { multiply_all(team, workspace.products + num_active(), num_active()); });
  crew.each([&](Team team) {
    combine(team, workspace.outputs, workspace.groups.places, workspace.weights, tokens.count, experts.top_k,
            experts.hidden, tokens.hidden, tokens.hidden_stride);
  });
}

// The `count` tokens from number `begin` on.
template <class T>
ExpertTokens<T> part_of(ExpertTokens<T> tokens, int64_t begin, int64_t count, int64_t top_k) {
  tokens.count = count;
  tokens.x += begin * tokens.x_stride;
  tokens.scores += begin * tokens.scores_stride;
  tokens.hidden += begin * tokens.hidden_stride;
  tokens.ids += begin * top_k;
  return tokens;
}

}  // namespace

template <class T>
void route(const Team& team, const float* scores, int64_t stride, int64_t num_tokens, int64_t num_experts,
           int64_t top_k, bool renormalize, int32_t* ids, float* weights) {
  Span own = share(team, num_tokens);
  for (int64_t token = own.begin; token < own.end; token++)
    route_token<T>(scores + token * stride, num_experts, top_k, renormalize, ids + token * top_k,
                   weights + token * top_k);
}

void group(const int32_t* ids, int64_t num_tokens, int64_t top_k, int64_t num_experts, const Groups& groups) {
  int64_t num_pairs = num_tokens * top_k;
  int32_t* next = groups.offsets;  // the place of the next pair of each expert, until all are placed
  std::fill_n(groups.offsets, num_experts + 1, 0);
  for (int64_t pair = 0; pair < num_pairs; pair++) groups.offsets[ids[pair] + 1]++;
  for (int64_t expert = 0; expert < num_experts; expert++) groups.offsets[expert + 1] += groups.offsets[expert];
  for (int64_t token = 0; token < num_tokens; token++)
    for (int64_t pair = token * top_k; pair < (token + 1) * top_k; pair++) {
      int32_t place = next[ids[pair]]++;
      groups.tokens[place] = int32_t(token);
      groups.places[pair] = place;
    }
  std::copy_backward(next, next + num_experts, next + num_experts + 1);  // each stands where the one behind it begins
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
    float* to = hidden + token * stride + begin;
    for_vectors(std::min(COLUMNS, size - begin), [&](int64_t i, auto count) {
      Floats total{};
      for (int64_t slot = 0; slot < top_k; slot++)
        total += factors[slot] * load_some(outputs + rows[slot] * size + begin + i, count);
      store_some(to + i, load_some(to + i, count) + total, count);
    });
  }
}

template <class T>
int64_t experts_scratch_size(const Experts<T>& experts, int64_t max_tokens) {
  return Workspace<T>(experts, ExpertScratch{nullptr, max_tokens}).size;
}

template <class T>
void compute_experts(Crew& crew, const Experts<T>& experts, const ExpertTokens<T>& tokens, int64_t* counts,
                     const ExpertScratch& scratch) {
  Workspace<T> workspace(experts, scratch);
  int64_t num_parts = (tokens.count + scratch.max_tokens - 1) / scratch.max_tokens;
  for (int64_t part = 0; part < num_parts; part++) {
    int64_t begin = tokens.count * part / num_parts, end = tokens.count * (part + 1) / num_parts;
    compute_part(crew, experts, part_of(tokens, begin, end - begin, experts.top_k), counts, workspace);
  }
}

template void route<float>(const Team&, const float*, int64_t, int64_t, int64_t, int64_t, bool, int32_t*, float*);
template void route<Bf16>(const Team&, const float*, int64_t, int64_t, int64_t, int64_t, bool, int32_t*, float*);
template int64_t experts_scratch_size(const Experts<float>&, int64_t);
template int64_t experts_scratch_size(const Experts<Bf16>&, int64_t);
template void compute_experts(Crew&, const Experts<float>&, const ExpertTokens<float>&, int64_t*,
                              const ExpertScratch&);
template void compute_experts(Crew&, const Experts<Bf16>&, const ExpertTokens<Bf16>&, int64_t*,
                              const ExpertScratch&);

}  // namespace eagleray

// ---- for tests and measurements. dtype: 0 float32, 1 bfloat16.

using namespace eagleray;

namespace {

template <class T>
Experts<T> experts_of(const void* const* gate_up, const void* const* down, int64_t num_experts, int64_t top_k,
                      int64_t hidden, int64_t inner, int renormalize, int round_weights) {
  return {num_experts, top_k, hidden, inner, reinterpret_cast<const T* const*>(gate_up),
          reinterpret_cast<const T* const*>(down), renormalize != 0, round_weights != 0};
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void er_route(const float* scores, int64_t stride, int64_t num_tokens, int64_t num_experts, int64_t top_k,
              int renormalize, int32_t* ids, float* weights, int dtype, int num_threads) {
  auto route_rounded = dtype == 0 ? route<float> : route<Bf16>;
  run_team(num_threads, [&](Team team) {
    route_rounded(team, scores, stride, num_tokens, num_experts, top_k, renormalize != 0, ids, weights);
  });
}

void er_group(const int32_t* ids, int64_t num_tokens, int64_t top_k, int64_t num_experts, int32_t* offsets,
              int32_t* tokens, int32_t* places) {
  group(ids, num_tokens, top_k, num_experts, Groups{offsets, tokens, places});
}

void er_combine(const float* outputs, const int32_t* places, const float* weights, int64_t num_tokens, int64_t top_k,
                int64_t size, float* hidden, int64_t stride, int num_threads) {
  run_team(num_threads, [&](Team team) {
    combine(team, outputs, places, weights, num_tokens, top_k, size, hidden, stride);
  });
}

int64_t er_experts_scratch_size(int64_t num_experts, int64_t top_k, int64_t hidden, int64_t inner, int64_t max_tokens,
                                int dtype) {
  auto size = [&](auto zero) {
    return experts_scratch_size(
        experts_of<decltype(zero)>(nullptr, nullptr, num_experts, top_k, hidden, inner, 0, 0), max_tokens);
  };
  return dtype == 0 ? size(float{}) : size(Bf16{});
}

// The strides are the sizes of rows; that of x is rounded up to even. `scratch` has room for `max_tokens`.
void er_compute_experts(const void* x, int64_t num_tokens, const float* scores, const void* const* gate_up,
                        const void* const* down, int64_t num_experts, int64_t top_k, int64_t hidden_size,
                        int64_t inner, int renormalize, int round_weights, float* hidden, int32_t* ids, int64_t* counts,
                        void* scratch, int64_t max_tokens, int dtype, int num_threads) {
  auto compute = [&](auto zero) {
    using T = decltype(zero);
    auto experts =
        experts_of<T>(gate_up, down, num_experts, top_k, hidden_size, inner, renormalize, round_weights);
    ExpertTokens<T> tokens{num_tokens,  static_cast<const T*>(x), round_up(hidden_size, 2), scores,
                           num_experts, hidden,                   hidden_size,              ids};
    run_crew(num_threads, [&](Crew& crew) {
      compute_experts(crew, experts, tokens, counts, ExpertScratch{scratch, max_tokens});
    });
  };
  if (dtype == 0) compute(float{});
  else compute(Bf16{});
}

}  // extern "C"
#pragma GCC visibility pop

#include "routing.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "ranking.h"
#include "rows.h"

namespace eagleray {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Insert the ids of `span` into `ids`, which has the `count` highest keys so far in order and keeps at most k. Return
// the new count. Among equal keys the one inserted first precedes.
int64_t choose(const float* keys, Span span, int64_t k, int32_t* ids, int64_t count = 0) {
  for (int64_t id = span.begin; id < span.end; id++) {
    int32_t key = order_key(keys[id]);
    if (count == k && key <= order_key(keys[ids[k - 1]])) continue;
    int64_t index = count < k ? count++ : k - 1;
    for (; index > 0 && key > order_key(keys[ids[index - 1]]); index--) ids[index] = ids[index - 1];
    ids[index] = int32_t(id);
  }
  return count;
}

float score_group(const float* keys, int64_t size, int64_t score) {
  int32_t best[2];
  int64_t count = choose(keys, {0, size}, score == GROUP_SCORE_TOP2 ? 2 : 1, best);
  return count == 2 ? keys[best[0]] + keys[best[1]] : keys[best[0]];
}

void choose_in_groups(const CRouterParams& router, const float* keys, int32_t* ids) {
  static thread_local std::vector<float> scores;
  static thread_local std::vector<int32_t> best;
  int64_t size = router.num_experts / router.num_groups, count = 0;
  scores.resize(size_t(router.num_groups)), best.resize(size_t(router.top_groups));
  for (int64_t group = 0; group < router.num_groups; group++)
    scores[size_t(group)] = score_group(keys + group * size, size, router.group_score);
  choose(scores.data(), {0, router.num_groups}, router.top_groups, best.data());
  std::sort(best.begin(), best.end());
  for (int32_t group : best) count = choose(keys, {group * size, (group + 1) * size}, router.top_k, ids, count);
}

// The ids of the top_k experts with the highest keys, in order.
void choose_experts(const CRouterParams& router, const float* keys, int32_t* ids) {
  if (router.num_groups > 1) choose_in_groups(router, keys, ids);
  else choose(keys, {0, router.num_experts}, router.top_k, ids);
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

Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-max(splat(-87.0f), x))); }

// The function from a token's scores to its probabilities.
struct Probability {
  int64_t scoring;
  float highest;  // of the scores
  float total;    // the denominator of a softmax

  Probability(const CRouterParams& router, const float* scores, float highest)
      : scoring(router.scoring),
        highest(highest),
        total(scoring == SCORING_SOFTMAX ? sum_of_exp(scores, router.num_experts, highest) : 1) {}

  float operator()(float score) const {
    return scoring == SCORING_SIGMOID ? sigmoid(splat(score))[0] : exp(splat(score - highest))[0] / total;
  }
  Floats operator()(Floats scores) const {
    return scoring == SCORING_SIGMOID ? sigmoid(scores) : exp(scores - highest) / total;
  }
};

// Whether the scores can be the keys: a softmax does not change their order.
bool chooses_by_score(const CRouterParams& router) {
  bool sums = router.num_groups > 1 && router.group_score == GROUP_SCORE_TOP2;
  return router.scoring == SCORING_SOFTMAX && !router.correction_bias && !sums;
}

// The keys [num_experts] by which experts are chosen otherwise, valid until the thread's next call.
const float* choice_keys(const CRouterParams& router, const float* scores, const Probability& probability) {
  static thread_local std::vector<float> keys;
  keys.resize(size_t(router.num_experts));
  const float* bias = router.correction_bias;
  for_vectors(router.num_experts, [&](int64_t i, auto count) {
    Floats key = probability(load_some(scores + i, count));
    store_some(keys.data() + i, bias ? key + load_some(bias + i, count) : key, count);
  });
  return keys.data();
}

template <class T>
void route_token(const CRouterParams& router, const float* scores, int32_t* ids, float* weights) {
  bool by_score = chooses_by_score(router);
  if (by_score) choose_experts(router, scores, ids);
  else choose(scores, {0, router.num_experts}, 1, ids);
  float highest = scores[ids[0]];
  Probability probability(router, scores, highest);
  if (!by_score) choose_experts(router, choice_keys(router, scores, probability), ids);
  if (router.scoring == SCORING_SOFTMAX && !std::isfinite(highest)) {
    std::fill_n(weights, router.top_k, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  float kept = 0;
  for (int64_t i = 0; i < router.top_k; i++) {
    weights[i] = probability(scores[ids[i]]);
    kept += weights[i];
  }
  float divisor = kept + router.renormalize_eps;
  for (int64_t i = 0; i < router.top_k; i++) {
    float weight = router.renormalize ? weights[i] / divisor : weights[i];
    weights[i] = to_float(from_float<T>(weight * router.scale));
  }
}

}  // namespace

template <class T>
void route(const Shard& shard, const CRouterParams& router, const float* scores, int64_t stride, int64_t num_tokens,
           int32_t* ids, float* weights) {
  Span own = range_of(shard, num_tokens);
  for (int64_t token = own.begin; token < own.end; token++)
    route_token<T>(router, scores + token * stride, ids + token * router.top_k, weights + token * router.top_k);
}

template void route<float>(const Shard&, const CRouterParams&, const float*, int64_t, int64_t, int32_t*, float*);
template void route<Bf16>(const Shard&, const CRouterParams&, const float*, int64_t, int64_t, int32_t*, float*);

}  // namespace eagleray

using namespace eagleray;

extern "C" void er_route(const CRouterParams* router, const float* scores, int64_t stride, int64_t num_tokens,
                         int32_t* ids, float* weights, int dtype, int num_threads) {
  auto route_rounded = router->round_weights && dtype ? route<Bf16> : route<float>;
  run_phase(num_threads, [&](Shard shard) {
    route_rounded(shard, *router, scores, stride, num_tokens, ids, weights);
  });
}

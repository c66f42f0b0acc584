#include "routing.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "ranking.h"
#include "rows.h"

namespace eagleray {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Offers the numbers of `span` to `ids`, which has the `count` highest so far, in order, and keeps k of them. Returns
// how many there are now. Of equal ones that come first which are offered first.
int64_t choose(const float* keys, Span span, int64_t k, int32_t* ids, int64_t count = 0) {
  for (int64_t id = span.begin; id < span.end; id++) {
    int32_t own = order(keys[id]);
    if (count == k && own <= order(keys[ids[k - 1]])) continue;
    int64_t place = count < k ? count++ : k - 1;
    for (; place > 0 && own > order(keys[ids[place - 1]]); place--) ids[place] = ids[place - 1];
    ids[place] = int32_t(id);
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

// The ids of the top_k highest, in order.
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

// A token's probabilities, of its scores.
struct Probability {
  int64_t scoring;
  float highest;  // of the scores
  float total;    // of a softmax

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

// The order of a softmax is that of the scores.
bool chooses_by_score(const CRouterParams& router) {
  bool sums = router.num_groups > 1 && router.group_score == GROUP_SCORE_TOP2;
  return router.scoring == SCORING_SOFTMAX && !router.correction_bias && !sums;
}

// By what experts are chosen otherwise: [num_experts], until the thread's next call.
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
  for (int64_t slot = 0; slot < router.top_k; slot++) {
    weights[slot] = probability(scores[ids[slot]]);
    kept += weights[slot];
  }
  float divisor = kept + router.renormalize_eps;
  for (int64_t slot = 0; slot < router.top_k; slot++) {
    float weight = router.renormalize ? weights[slot] / divisor : weights[slot];
    weights[slot] = to_float(from_float<T>(weight * router.scale));
  }
}

}  // namespace

template <class T>
void route(const Team& team, const CRouterParams& router, const float* scores, int64_t stride, int64_t num_tokens,
           int32_t* ids, float* weights) {
  Span own = share(team, num_tokens);
  for (int64_t token = own.begin; token < own.end; token++)
    route_token<T>(router, scores + token * stride, ids + token * router.top_k, weights + token * router.top_k);
}

template void route<float>(const Team&, const CRouterParams&, const float*, int64_t, int64_t, int32_t*, float*);
template void route<Bf16>(const Team&, const CRouterParams&, const float*, int64_t, int64_t, int32_t*, float*);

}  // namespace eagleray

using namespace eagleray;

extern "C" void er_route(const CRouterParams* router, const float* scores, int64_t stride, int64_t num_tokens,
                         int32_t* ids, float* weights, int dtype, int num_threads) {
  auto route_rounded = router->round_weights && dtype ? route<Bf16> : route<float>;
  run_team(num_threads, [&](Team team) {
    route_rounded(team, *router, scores, stride, num_tokens, ids, weights);
  });
}

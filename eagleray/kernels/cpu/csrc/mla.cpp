// The phases of latent attention, and its products with the matrices of the heads.
#include "mla.h"

#include <algorithm>
#include <vector>

#include "product.h"
#include "rotate.h"

namespace eagleray {
namespace {

// Some consecutive tokens of a batch, as a batch of their own.
class BatchPart {
 public:
  BatchPart(const CAttentionMetadata& batch, Span tokens) : metadata_(batch) {
    if (tokens.begin == 0 && tokens.end == batch.num_tokens) return;
    int64_t row = 0;
    while (batch.query_start_loc[row + 1] <= tokens.begin) row++;
    metadata_.block_table = batch.block_table + row * batch.table_stride;
    starts_ = {0};
    for (; row < batch.num_rows && batch.query_start_loc[row] < tokens.end; row++) {
      const int64_t end = batch.query_start_loc[row + 1], computed = std::min(end, tokens.end);
      starts_.push_back(int32_t(computed - tokens.begin));
      seq_lens_.push_back(int32_t(batch.seq_lens[row] - (end - computed)));
    }
    metadata_.num_rows = int64_t(seq_lens_.size());
    metadata_.num_tokens = tokens.end - tokens.begin;
    metadata_.query_start_loc = starts_.data();
    metadata_.seq_lens = seq_lens_.data();
    metadata_.positions += tokens.begin;
    metadata_.slot_mapping += tokens.begin;
  }
  BatchPart(const BatchPart&) = delete;

  const CAttentionMetadata& metadata() const { return metadata_; }

 private:
  CAttentionMetadata metadata_;
  std::vector<int32_t> starts_, seq_lens_;
};

// The rows [num_tokens, num_heads, stride] of a product for each head, of which it reads or writes the first features.
template <class Number>
struct HeadRows {
  Number* of_first;
  int64_t stride;
};

// y = x W^T with a weight [n, k] of each head.
template <class T>
void multiply_heads(const Shard& shard, const CMLAParams& params, int64_t num_tokens, HeadRows<const T> x,
                    const void* weights, int64_t n, int64_t k, HeadRows<T> y) {
  static thread_local std::vector<Product<T>> products;
  products.clear();
  for (int64_t head = 0; head < params.num_heads; head++)
    products.push_back({x.of_first + head * x.stride, params.num_heads * x.stride, nullptr, num_tokens,
                        static_cast<const T*>(weights) + head * packed_size<T>(n, k), n, k, nullptr, EPILOGUE_ROUND,
                        {}, y.of_first + head * y.stride, params.num_heads * y.stride});
  multiply_all(shard, products.data(), params.num_heads);
}

}  // namespace

template <class T>
void prepare_mla(const Shard& shard, const CMLAParams& params, const CAttentionMetadata& metadata,
                 const MLAInputs& inputs, T* prepared, T* cache) {
  const int64_t heads = params.num_heads, rank = params.rank, plain = params.plain_dim, half = params.rotated_dim / 2;
  const int64_t size = plain + params.rotated_dim, cached_size = rank + params.rotated_dim;
  const Span own = range_of(shard, metadata.num_tokens * (heads + 1));  // a token's queries, then its latent
  for (int64_t item = own.begin; item < own.end; item++) {
    const int64_t token = item / (heads + 1), head = item % (heads + 1);
    const int64_t turn = metadata.positions[token] * half;
    auto rotate = [&](const float* from, T* to) {
      norm_and_rotate(from, half, nullptr, 0.0f, inputs.cos + turn, inputs.sin + turn, to);
    };
    if (head < heads) {
      const float* query = inputs.queries + (token * heads + head) * size;
      T* to = prepared + (token * heads + head) * size;
      for_vectors(plain, [&](int64_t i, auto count) { store_some(to + i, load_some(query + i, count), count); });
      rotate(query + plain, to + plain);
    } else {
      const float* latent = inputs.latents + token * cached_size;
      T* to = cache + metadata.slot_mapping[token] * cached_size;
      normalize(Shard{0, 1}, latent, 0, 1, rank, params.norm, params.eps, to, 0);
      rotate(latent + rank, to + rank);
    }
  }
}

template <class T>
void attend_mla(Team& team, const CMLAParams& params, const CAttentionMetadata& metadata, const MLAInputs& inputs,
                T* prepared, T* cache, T* out, const MLAScratch<T>& scratch) {
  const int64_t heads = params.num_heads, rank = params.rank, query_size = params.plain_dim + params.rotated_dim;
  team.for_each_shard([&](Shard shard) { prepare_mla(shard, params, metadata, inputs, prepared, cache); });
  for (int64_t first = 0; first < metadata.num_tokens; first += scratch.max_tokens) {
    const BatchPart part(metadata, {first, std::min(first + scratch.max_tokens, metadata.num_tokens)});
    const int64_t num_tokens = part.metadata().num_tokens;
    const T* queries = prepared + first * heads * query_size;
    T *latents = scratch.latents, *results = out + first * heads * params.value_dim;
    team.for_each_shard([&](Shard shard) {
      multiply_heads<T>(shard, params, num_tokens, {queries, query_size}, params.keys, rank, params.plain_dim,
                        {latents, rank});
    });
    team.for_each_shard([&](Shard shard) {
      attend_latents(shard, params, part.metadata(), queries, cache, latents, scratch.splits);
    });
    team.for_each_shard([&](Shard shard) {
      multiply_heads<T>(shard, params, num_tokens, {latents, rank}, params.values, params.value_dim, rank,
                        {results, params.value_dim});
    });
  }
}

template void attend_mla(Team&, const CMLAParams&, const CAttentionMetadata&, const MLAInputs&, float*, float*, float*,
                         const MLAScratch<float>&);
template void attend_mla(Team&, const CMLAParams&, const CAttentionMetadata&, const MLAInputs&, Bf16*, Bf16*, Bf16*,
                         const MLAScratch<Bf16>&);

}  // namespace eagleray

using namespace eagleray;

extern "C" {

int64_t er_mla_scratch_size(const CMLAParams* params, int64_t max_context, int num_threads) {
  return attend_latents_scratch(*params, max_context, num_threads) * int64_t(sizeof(float));
}

void er_attend_mla(const CMLAParams* params, const CAttentionMetadata* metadata, const float* queries,
                   const float* latents, const float* cos, const float* sin, void* prepared, void* cache, void* out,
                   const CMLAScratch* scratch, int dtype, int num_threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const MLAScratch<T> typed{scratch->splits, static_cast<T*>(scratch->latents), scratch->max_tokens};
    run_team(num_threads, [&](Team& team) {
      attend_mla(team, *params, *metadata, {queries, latents, cos, sin}, static_cast<T*>(prepared),
                 static_cast<T*>(cache), static_cast<T*>(out), typed);
    });
  });
}

}  // extern "C"

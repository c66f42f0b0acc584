// Queries, and keys and values in the cache, from the product of a layer's hidden states with its qkv weight.
#include "attention.h"
#include "rotate.h"

namespace eagleray {
namespace {

template <class T>
void write_key(const T* key, int64_t size, int64_t lanes, int64_t lane, T* keys) {
  for (int64_t i = 0; i < size; i += PAIR<T>)
    std::memcpy((void*)(keys + i * lanes + lane * PAIR<T>), key + i, PAIR<T> * sizeof(T));
}

template <class T>
void write_value(const T* value, int64_t size, int64_t lane, T* values) {
  T* to = values + lane / PAIR<T> * size * PAIR<T> + lane % PAIR<T>;
  for (int64_t i = 0; i < size; i++) to[i * PAIR<T>] = value[i];
}

}  // namespace

template <class T>
void prepare(const Shard& shard, const CAttentionParams& params, const CAttentionMetadata& metadata, const float* qkv,
             const float* q_norm, const float* k_norm, float eps, const float* cos, const float* sin, T* queries,
             T* cache) {
  const int64_t heads = params.num_heads, kv_heads = params.num_kv_heads, group = heads / kv_heads;
  const int64_t size = params.head_dim, half = size / 2, lanes = lanes_of_block(params);
  alignas(64) T key[MAX_HEAD_DIM], value[MAX_HEAD_DIM];
  const Span own = range_of(shard, metadata.num_tokens * kv_heads);
  for (int64_t item = own.begin; item < own.end; item++) {
    const int64_t token = item / kv_heads, kv_head = item % kv_heads;
    const float* from = qkv + token * (heads + 2 * kv_heads) * size;
    const int64_t turn = metadata.positions[token] * half;
    auto rotate = [&](int64_t head, const float* norm, T* out) {
      norm_and_rotate(from + head * size, half, norm, eps, cos + turn, sin + turn, out);
    };
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
      rotate(head, q_norm, queries + (token * heads + head) * size);
    rotate(heads + kv_head, k_norm, key);
    const float* v = from + (heads + kv_heads + kv_head) * size;
    for_vectors(size, [&](int64_t i, auto count) { store_some(value + i, load_some(v + i, count), count); });
    const int64_t slot = metadata.slot_mapping[token];
    const int64_t block = slot / params.block_size, lane = slot % params.block_size;
    T* keys = cache + (block * kv_heads + kv_head) * 2 * lanes * size;
    write_key(key, size, lanes, lane, keys);
    write_value(value, size, lane, keys + lanes * size);
  }
}

template void prepare(const Shard&, const CAttentionParams&, const CAttentionMetadata&, const float*, const float*,
                      const float*, float, const float*, const float*, float*, float*);
template void prepare(const Shard&, const CAttentionParams&, const CAttentionMetadata&, const float*, const float*,
                      const float*, float, const float*, const float*, Bf16*, Bf16*);

}  // namespace eagleray

using namespace eagleray;

extern "C" void er_prepare(const CAttentionParams* params, const CAttentionMetadata* metadata, const float* qkv,
                           const float* q_norm, const float* k_norm, float eps, const float* cos, const float* sin,
                           void* queries, void* cache, int dtype, int num_threads) {
  run_phase(num_threads, [&](const Shard& shard) {
    if (dtype) prepare(shard, *params, *metadata, qkv, q_norm, k_norm, eps, cos, sin, (Bf16*)queries, (Bf16*)cache);
    else prepare(shard, *params, *metadata, qkv, q_norm, k_norm, eps, cos, sin, (float*)queries, (float*)cache);
  });
}

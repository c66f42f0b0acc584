// Queries, and keys and values in the cache, from the product of a layer's hidden states with its qkv weight.
#include "cache_format.h"
#include "rotate.h"

namespace eagleray {
namespace {

template <class Stored, int64_t PAIR>
void write_key(const Stored* key, int64_t size, int64_t lanes, int64_t lane, Stored* keys) {
  for (int64_t i = 0; i < size; i += PAIR)
    std::memcpy((void*)(keys + i * lanes + lane * PAIR), key + i, PAIR * sizeof(Stored));
}

template <class Stored, int64_t PAIR>
void write_value(const Stored* value, int64_t size, int64_t lane, Stored* values) {
  Stored* to = values + lane / PAIR * size * PAIR + lane % PAIR;
  for (int64_t i = 0; i < size; i++) to[i * PAIR] = value[i];
}

// A key or value as it is before it is cached, and as it is cached.
template <class T, class Format, bool HAS_SCALES = Format::HAS_SCALES>
struct CachedNumbers {
  alignas(64) T numbers[MAX_HEAD_DIM];

  const T* quantize(int64_t, Bf16*) { return numbers; }
};

template <class T, class Format>
struct CachedNumbers<T, Format, true> {
  alignas(64) float numbers[MAX_HEAD_DIM] = {};  // zeros follow those of a head
  alignas(64) int8_t codes[MAX_HEAD_DIM];

  const int8_t* quantize(int64_t size, Bf16* scale) {
    *scale = quantize_numbers<Format>(numbers, round_up(size, LANES), codes);
    return codes;
  }
};

template <class T, class Format>
void prepare(const Shard& shard, const CAttentionParams& params, const CAttentionMetadata& metadata, const float* qkv,
             const float* q_norm, const float* k_norm, float eps, const float* cos, const float* sin, T* queries,
             typename Format::Stored* cache) {
  using Stored = typename Format::Stored;
  constexpr int64_t PAIR = eagleray::PAIR<typename Format::Number>;
  const int64_t heads = params.num_heads, kv_heads = params.num_kv_heads, group = heads / kv_heads;
  const int64_t size = params.head_dim, half = size / 2, lanes = lanes_of_block(params);
  CachedNumbers<T, Format> key, value;
  const Span own = range_of(shard, metadata.num_tokens * kv_heads);
  for (int64_t item = own.begin; item < own.end; item++) {
    const int64_t token = item / kv_heads, kv_head = item % kv_heads;
    const float* from = qkv + token * (heads + 2 * kv_heads) * size;
    const int64_t turn = metadata.positions[token] * half;
    auto rotate = [&](int64_t head, const float* norm, auto* out) {
      norm_and_rotate(from + head * size, half, norm, eps, cos + turn, sin + turn, out);
    };
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
      rotate(head, q_norm, queries + (token * heads + head) * size);
    rotate(heads + kv_head, k_norm, key.numbers);
    const float* v = from + (heads + kv_heads + kv_head) * size;
    for_vectors(size, [&](int64_t i, auto count) { store_some(value.numbers + i, load_some(v + i, count), count); });
    const int64_t slot = metadata.slot_mapping[token];
    const int64_t block = slot / params.block_size, lane = slot % params.block_size;
    Stored *keys = cache + (block * kv_heads + kv_head) * head_elements(params), *values = keys + lanes * size;
    Bf16* scales = reinterpret_cast<Bf16*>(values + lanes * size);
    write_key<Stored, PAIR>(key.quantize(size, scales + lane), size, lanes, lane, keys);
    write_value<Stored, PAIR>(value.quantize(size, scales + lanes + lane), size, lane, values);
  }
}

}  // namespace

template <class T>
void prepare(const Shard& shard, const CAttentionParams& params, const CAttentionMetadata& metadata, const float* qkv,
             const float* q_norm, const float* k_norm, float eps, const float* cos, const float* sin, T* queries,
             void* cache) {
  with_format<T>(params.cache_format, [&](auto format) {
    using Format = decltype(format);
    prepare<T, Format>(shard, params, metadata, qkv, q_norm, k_norm, eps, cos, sin, queries,
                       static_cast<typename Format::Stored*>(cache));
  });
}

template void prepare(const Shard&, const CAttentionParams&, const CAttentionMetadata&, const float*, const float*,
                      const float*, float, const float*, const float*, float*, void*);
template void prepare(const Shard&, const CAttentionParams&, const CAttentionMetadata&, const float*, const float*,
                      const float*, float, const float*, const float*, Bf16*, void*);

}  // namespace eagleray

using namespace eagleray;

extern "C" void er_prepare(const CAttentionParams* params, const CAttentionMetadata* metadata, const float* qkv,
                           const float* q_norm, const float* k_norm, float eps, const float* cos, const float* sin,
                           void* queries, void* cache, int dtype, int num_threads) {
  run_phase(num_threads, [&](const Shard& shard) {
    if (dtype) prepare(shard, *params, *metadata, qkv, q_norm, k_norm, eps, cos, sin, (Bf16*)queries, cache);
    else prepare(shard, *params, *metadata, qkv, q_norm, k_norm, eps, cos, sin, (float*)queries, cache);
  });
}

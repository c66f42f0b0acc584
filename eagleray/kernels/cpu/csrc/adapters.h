// Low-rank adapters of a product: y += scale * B (A x) for the tokens that have one.
//
// The tokens of an adapter are computed together, so that its factors are read once. All sums are float32, and each runs
// in an order that depends on its own token and adapter only.
#pragma once

#include "product.h"

namespace eagleray {

// The floats of scratch for a product of `num_tokens` tokens: A x of the tokens with adapters; if the product is gated,
// the results before the gate follow, [num_tokens, 2 * inner rounded up to a multiple of 16].
int64_t adapter_scratch_size(const CMultiply& args, int64_t num_tokens);

// The tokens of a batch to whose product adapters are added.
template <class T>
struct AdaptedRows {
  const CMultiply& args;
  const CAdapterSite& site;
  const CBatch& batch;
  int64_t num_tokens;
  float* inner;  // [tokens with adapters, num_layers, max_rank] scale * A x, in the order of batch.adapter_tokens
  float* y;      // [num_tokens, outputs] the product before the gate
  int64_t y_stride;

  // out: the result of a product that is not gated
  AdaptedRows(const CMultiply& args, const CBatch& batch, int64_t num_tokens, void* out, int64_t out_stride);
};

// Compute the shard's part of A x. x: [num_tokens, k]
template <class T>
void shrink(const Shard& shard, const AdaptedRows<T>& rows, const T* x, int64_t x_stride);

// Add the shard's part of B (A x).
template <class T>
void expand(const Shard& shard, const AdaptedRows<T>& rows);

// Add the shard's part of B (A x) to the product before the gate, and the bias, and apply the gate to all tokens.
template <class T>
void expand_and_gate(const Shard& shard, const AdaptedRows<T>& rows, T* out, int64_t out_stride);

}  // namespace eagleray

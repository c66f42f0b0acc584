// Low-rank adapters of a product: y += scale * B (A x) for the tokens that have one.
//
// The tokens of an adapter are computed together, so that its factors are read once. A x is computed before the
// product. B (A x) is added to the sums of each panel while they are in the first-level cache; its factors come from
// memory while the panel is multiplied. All sums are float32, and each runs in an order that depends on its own token
// and adapter only.
#pragma once

#include <vector>

#include "product_tile.h"

namespace eagleray {

// The floats of scratch for a product of `num_tokens` tokens.
int64_t adapter_scratch_size(const CMultiply& args, int64_t num_tokens);

// The tokens of a batch to whose product adapters are added.
template <class T>
struct AdaptedRows {
  const CAdapterSite& site;
  const CBatch& batch;
  bool is_gated;
  float* inner;  // [tokens with adapters, num_layers, max_rank] scale * A x, in the order of batch.adapter_tokens

  AdaptedRows(const CMultiply& args, const CBatch& batch);

  // Whether no adapter of the batch has factors for this product.
  bool is_empty() const;
};

// Compute the shard's part of A x. x: [num_tokens, k]
template <class T>
void shrink(const Shard& shard, const AdaptedRows<T>& rows, const T* x, int64_t x_stride);

// The tokens of one adapter in a block of rows, and one of its factors B.
template <class T>
struct AdapterPiece {
  int64_t layer;
  const T* b;             // [outputs / 16, vector_stride]
  int64_t rank;
  int64_t vector_stride;
  const float* inner;     // [num_tokens, inner_stride] scale * A x
  int64_t inner_stride;
  const int32_t* tokens;  // [num_tokens]
  int64_t num_tokens;
};

// The tokens with adapters in a block of rows.
template <class T>
class AdaptedBlock {
 public:
  AdaptedBlock(const AdaptedRows<T>& rows, Span block);

  // Add the factors that `expand` reads for a panel.
  void list_factors(int64_t panel, LineList& lines) const;

  // Add B (A x) to the results of a panel, sums [rows of the block, PANEL].
  void expand(int64_t panel, float* sums) const;

 private:
  template <class Visit>
  void for_pieces(int64_t panel, Visit&& visit) const;

  const AdaptedRows<T>& rows;
  int64_t begin;
  std::vector<AdapterPiece<T>> pieces;  // layer by layer
};

}  // namespace eagleray

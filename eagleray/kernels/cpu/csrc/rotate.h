// The rotary position embedding of a head, whose first features are the first halves of all pairs.
#pragma once

#include "rows.h"

namespace eagleray {
namespace {

// Normalize x by weight, unless it is null, and rotate it. The function is not inlined, so that every head is computed
// by the same instructions.
template <class T>
__attribute__((noinline)) void norm_and_rotate(const float* x, int64_t half, const float* weight, float eps,
                                               const float* cos, const float* sin, T* out) {
  Floats scale = splat(1.0f);
  if (weight) {
    Floats squares = {};
    for_vectors(2 * half, [&](int64_t i, auto count) {
      Floats part = load_some(x + i, count);
      squares += part * part;
    });
    scale = splat(1.0f / std::sqrt(sum(squares) / float(2 * half) + eps));
  }
  for_vectors(half, [&](int64_t i, auto count) {
    Floats first = load_some(x + i, count), second = load_some(x + half + i, count);
    if (weight) {
      first = first * scale * load_some(weight + i, count);
      second = second * scale * load_some(weight + half + i, count);
    }
    Floats c = load_some(cos + i, count), s = load_some(sin + i, count);
    store_some(out + i, first * c - second * s, count);
    store_some(out + half + i, second * c + first * s, count);
  });
}

}  // namespace
}  // namespace eagleray

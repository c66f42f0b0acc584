// Random draws of tokens by their logits, one for each row.
//
// A token weighs floor(2^40 exp((logit - highest) / temperature)), so the likeliest one weighs 2^40. Sums of integers are
// exact in any order: a draw depends on its own logits, parameters and uniform number, however rows are divided.
//
// A draw is from a front of its row: of the tokens in the order of ranking.h, the first top_k, and of these the fewest
// that have top_p of their weight. A front of few tokens is found among the highest logits, any other one by three
// passes over the row, each of which finds some bits of the key of the front's last token. No row is sorted.
//
// The shards divide pieces of rows, then rows. All threads of the team call these functions.
#pragma once

#include "base.h"

namespace eagleray {

// The number of bytes of scratch that `draw` needs, at an address that is a multiple of 8.
int64_t draw_scratch_size(int64_t count, int64_t size);

// Draw a token of each of the rows: the first one of its front, by ascending id, at which the sum of the weights exceeds
// the uniform number's share of their total. See er_draw.
void draw(Team& team, const float* logits, int64_t stride, int64_t size, const float* highest, const CDraws& draws,
          int64_t* ids, void* scratch);

}  // namespace eagleray

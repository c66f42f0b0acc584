#include "draw.h"

#include <algorithm>

namespace eagleray {
namespace {

// Logits of a block, whose weights are summed up in 32-bit lanes.
constexpr int64_t BLOCK = 256;
// Blocks that one thread takes at a time.
constexpr int64_t BLOCKS_OF_PIECE = 16;
// Distance below the highest logit at which a token weighs nothing. Longer ones are cut to it, because they may be
// infinite.
constexpr float WEIGHTLESS_DISTANCE = 32;

// A weight of up to 2^40 is high * 2^20 + low.
constexpr int LOW_BITS = DRAW_ONE_BITS / 2;

struct Weights {
  Ints high, low;  // [16]

  int64_t operator[](int lane) const { return (int64_t(high[lane]) << LOW_BITS) + low[lane]; }
};

// The parameters of a row.
struct Weighing {
  float highest, temperature, least;

  Weighing(float highest, float temperature, int64_t least_weight)
      : highest(highest), temperature(temperature), least(float(least_weight)) {
    if (int64_t(least) < least_weight) least = std::nextafter(least, INFINITY);  // no weight lies between them
  }

  Weights operator()(Floats logits) const {
    Floats farthest = splat(WEIGHTLESS_DISTANCE);
    Floats distance = (highest - logits) / temperature;
    distance = select_below(distance, farthest, distance, farthest);
    Floats weight = exp(-distance) * float(int64_t(1) << DRAW_ONE_BITS);
    weight = select_below(weight, splat(least), splat(0.0f), weight);
    Ints high = __builtin_convertvector(weight * (1.0f / (1 << LOW_BITS)), Ints);
    Floats rest = weight - __builtin_convertvector(high, Floats) * float(1 << LOW_BITS);  // exact
    return {high, __builtin_convertvector(rest, Ints)};
  }
};

// Load 16 logits. Lanes beyond `left` get minus infinity, which weighs nothing.
Floats load_padded(const float* x, int64_t left) {
  if (left >= LANES) return load(x);
  Floats padded = splat(-INFINITY);
  std::memcpy(&padded, x, left * sizeof(float));
  return padded;
}

int64_t sum_of(Ints x) {
  int64_t sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += x[lane];
  return sum;
}

int64_t sum_of_block(const Weighing& weigh, const float* x, int64_t size) {
  Ints high{}, low{};
  for (int64_t i = 0; i < size; i += LANES) {
    Weights weights = weigh(load_padded(x + i, size - i));
    high += weights.high;
    low += weights.low;
  }
  return (sum_of(high) << LOW_BITS) + sum_of(low);
}

// The first of the tokens at which the sum of the weights exceeds `target`. One exists, because `target` is below their sum.
int64_t find_in_block(const Weighing& weigh, const float* x, int64_t size, int64_t target) {
  for (int64_t i = 0; i < size; i += LANES) {
    Weights weights = weigh(load_padded(x + i, size - i));
    for (int lane = 0; lane < LANES; lane++)
      if ((target -= weights[lane]) < 0) return i + lane;
  }
  return size - 1;
}

int64_t count_of(int64_t size, int64_t each) { return (size + each - 1) / each; }

}  // namespace

int64_t draw_scratch_size(int64_t count, int64_t size) {
  return count * count_of(size, BLOCK) * int64_t(sizeof(int64_t));
}

void draw(Team& team, const float* logits, int64_t stride, int64_t size, const float* highest, const CDraws& draws,
          int64_t* ids, void* scratch) {
  int64_t* sums = static_cast<int64_t*>(scratch);  // [count, blocks]
  int64_t num_blocks = count_of(size, BLOCK), num_pieces = count_of(num_blocks, BLOCKS_OF_PIECE);
  auto weighing = [&](int64_t i) {
    return Weighing(highest[draws.rows[i]], draws.temperature[i], draws.least_weights[i]);
  };
  team.for_each_shard([&](Shard shard) {
    Span own = range_of(shard, draws.count * num_pieces);
    for (int64_t index = own.begin; index < own.end; index++) {
      int64_t i = index / num_pieces, first = index % num_pieces * BLOCKS_OF_PIECE;
      Weighing weigh = weighing(i);
      const float* row = logits + draws.rows[i] * stride;
      for (int64_t block = first; block < std::min(first + BLOCKS_OF_PIECE, num_blocks); block++) {
        int64_t begin = block * BLOCK;
        sums[i * num_blocks + block] = sum_of_block(weigh, row + begin, std::min(BLOCK, size - begin));
      }
    }
  });
  team.for_each_shard([&](Shard shard) {
    Span own = range_of(shard, draws.count);
    for (int64_t i = own.begin; i < own.end; i++) {
      const int64_t* of_row = sums + i * num_blocks;
      int64_t total = 0, block = 0;
      for (int64_t each = 0; each < num_blocks; each++) total += of_row[each];
      int64_t target = std::min(int64_t(draws.uniforms[i] * double(total)), total - 1);
      while (target >= of_row[block]) target -= of_row[block++];
      int64_t begin = block * BLOCK, row = draws.rows[i];
      const float* x = logits + row * stride + begin;
      ids[row] = begin + find_in_block(weighing(i), x, std::min(BLOCK, size - begin), target);
    }
  });
}

}  // namespace eagleray

using namespace eagleray;

extern "C" {

int64_t er_draw_scratch_size(int64_t count, int64_t size) { return draw_scratch_size(count, size); }

void er_draw(const float* logits, int64_t stride, int64_t size, const float* highest, const CDraws* draws,
             int64_t* ids, void* scratch, int num_threads) {
  run_team(num_threads, [&](Team& team) { draw(team, logits, stride, size, highest, *draws, ids, scratch); });
}

}  // extern "C"

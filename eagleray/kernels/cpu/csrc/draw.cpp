#include "draw.h"

#include <algorithm>

#include "ranking.h"

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

int64_t count_of(int64_t size, int64_t each) { return (size + each - 1) / each; }

struct Weights {
  Ints high, low;  // [16]

  int64_t operator[](int lane) const { return (int64_t(high[lane]) << LOW_BITS) + low[lane]; }
};

// Returns the weights of logits by the parameters of a row.
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

// The last token of a front of a row. A front has the tokens up to one of them in the order of ranking.h.
struct Front {
  int32_t key = INT32_MIN;  // below all keys: the front has all tokens
  int32_t id = 0;

  bool has_all() const { return key == INT32_MIN; }
};

// The logits of a row. Those behind a front are read as minus infinity.
struct Row {
  const float* logits;
  int64_t size;
  Front front = {};

  Floats operator()(int64_t i) const {  // 16 of them
    Floats x = load_padded(logits + i, size - i);
    if (front.has_all()) return x;
    Ints keys = order_key(x), ids = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + int32_t(i);
    Ints is_behind = (keys < front.key) | ((keys == front.key) & (ids > front.id));
    return is_behind ? splat(-INFINITY) : x;
  }
};

// ---- from all tokens of a front

int64_t sum_of(Ints x) {
  int64_t sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += x[lane];
  return sum;
}

int64_t sum_of_block(const Weighing& weigh, const Row& row, int64_t block) {
  Ints high{}, low{};
  for (int64_t i = block * BLOCK; i < std::min((block + 1) * BLOCK, row.size); i += LANES) {
    Weights weights = weigh(row(i));
    high += weights.high;
    low += weights.low;
  }
  return (sum_of(high) << LOW_BITS) + sum_of(low);
}

// sums: [blocks] the sum of each block
void sum_up(const Weighing& weigh, const Row& row, int64_t first_block, int64_t last_block, int64_t* sums) {
  for (int64_t block = first_block; block < last_block; block++) sums[block] = sum_of_block(weigh, row, block);
}

int64_t total_of(const int64_t* sums, int64_t num_blocks) {
  int64_t total = 0;
  for (int64_t block = 0; block < num_blocks; block++) total += sums[block];
  return total;
}

// Map a number of (0, 1) to an integer of [0, total).
int64_t target_of(double uniform, int64_t total) { return std::min(int64_t(uniform * double(total)), total - 1); }

// The first token at which the sum of the weights exceeds the target. One exists, because the target is below their sum.
int64_t pick(const Weighing& weigh, const Row& row, const int64_t* sums, double uniform) {
  int64_t target = target_of(uniform, total_of(sums, count_of(row.size, BLOCK))), block = 0;
  while (target >= sums[block]) target -= sums[block++];
  for (int64_t i = block * BLOCK; i < row.size; i += LANES) {
    Weights weights = weigh(row(i));
    for (int lane = 0; lane < LANES; lane++)
      if ((target -= weights[lane]) < 0) return i + lane;
  }
  return row.size - 1;
}

// ---- the front that top_k and top_p keep

// The least weight that the kept tokens have together.
int64_t mass_of(double top_p, int64_t total) {
  return top_p < 1 ? int64_t(std::ceil(top_p * double(total))) : total;
}

// A part of the bits of a key, and the number of lower ones.
struct Digit {
  int bits, shift;
};
constexpr Digit DIGITS[] = {{11, 21}, {11, 10}, {10, 0}};

// Amounts that count tokens.
struct Ones {
  int64_t operator[](int) const { return 1; }
};

// Unsigned keys, of which certain bits are known.
struct Known {
  uint32_t mask = 0, bits = 0;

  bool fit(uint32_t key) const { return (key & mask) == bits; }
  bool fit_any(Words keys) const {
    Ints fitting = (keys & mask) == bits;
    uint64_t parts[sizeof fitting / sizeof(uint64_t)], any = 0;
    std::memcpy(parts, &fitting, sizeof fitting);
    for (uint64_t part : parts) any |= part;
    return any != 0;
  }
};

// Call visit(id, unsigned key, amount) for the tokens with such keys, by ascending id, until it returns true.
template <class Amounts, class Visit>
void for_tokens(const Row& row, const Known& known, Amounts&& amounts_of, Visit&& visit) {
  for (int64_t i = 0; i < row.size; i += LANES) {
    Floats logits = row(i);
    Words order = (Words)order_key(logits) ^ 0x80000000u;
    if (!known.fit_any(order)) continue;
    auto amounts = amounts_of(logits);
    uint32_t keys[LANES];
    std::memcpy(keys, &order, sizeof keys);
    int lanes = int(std::min<int64_t>(LANES, row.size - i));
    for (int lane = 0; lane < lanes; lane++)
      if (known.fit(keys[lane]) && visit(int32_t(i + lane), keys[lane], amounts[lane])) return;
  }
}

// The shortest front of the row whose amounts sum up to the target, or its own one if all of them do not. It is found
// digit by digit of the last token's key, by the sums of the amounts of each value that a digit has.
template <class Amounts>
Front find_front(const Row& row, int64_t target, Amounts&& amounts_of) {
  Known known;
  int64_t before = 0;  // the sum of the amounts of higher keys
  for (Digit digit : DIGITS) {
    int64_t sums[1 << 11] = {};
    uint32_t last = (1u << digit.bits) - 1, value = last;
    for_tokens(row, known, amounts_of, [&](int32_t, uint32_t key, int64_t amount) {
      sums[key >> digit.shift & last] += amount;
      return false;
    });
    while (value > 0 && before + sums[value] < target) before += sums[value--];
    known = {known.mask | last << digit.shift, known.bits | value << digit.shift};
  }
  Front front = row.front;
  for_tokens(row, known, amounts_of, [&](int32_t id, uint32_t key, int64_t amount) {
    if ((before += amount) < target) return false;
    front = {int32_t(key ^ 0x80000000u), id};
    return true;
  });
  return front;
}

// ---- draws

struct Draw {
  Row row;
  Weighing weigh;
  double uniform, top_p;
  int64_t top_k;  // at most the size of the row

  Draw(const CDraws& draws, int64_t i, const float* logits, int64_t stride, int64_t size, const float* highest)
      : row{logits + draws.rows[i] * stride, size},
        weigh(highest[draws.rows[i]], draws.temperature[i], draws.least_weights[i]),
        uniform(draws.uniforms[i]), top_p(draws.top_p[i]), top_k(std::min(draws.top_k[i], size)) {}

  bool keeps_all() const { return top_k == row.size && top_p >= 1; }
  bool keeps_few() const { return !keeps_all() && top_k <= MAX_TOP_K; }
  // Whether top_p alone restricts the draw, perhaps to few tokens.
  bool may_keep_few() const { return !keeps_all() && !keeps_few() && top_k == row.size; }

  // The number of highest logits among which the kept ones are looked for. If only top_p tells how many these are, as
  // many as there are blocks of keys: for more of them all blocks would be read.
  int64_t num_highest() const {
    return std::min(keeps_few() ? top_k : count_of(row.size, RANKED_BLOCK), int64_t(MAX_TOP_K));
  }

  // Whether the draw needs the sums of the blocks' weights, or the keys of `rank_blocks`. Both are computed in parallel.
  bool needs_sums() const { return keeps_all() || may_keep_few(); }
  bool needs_keys() const { return keeps_few() || may_keep_few(); }
};

struct Token {
  int32_t id;
  int64_t weight;
};

// Draw from the highest logits, or return -1 if they have less than the mass that top_p keeps of all. highest: keys of
// the row, see `rank_blocks`; sums: [blocks] of all tokens, unless top_k is small.
int64_t draw_from_few(const Draw& draw, const int32_t* highest, const int64_t* sums) {
  int64_t count = draw.num_highest(), total = 0;
  int32_t ids[MAX_TOP_K];
  float logits[MAX_TOP_K];
  Token tokens[MAX_TOP_K];
  top_k_of_row(draw.row.logits, draw.row.size, highest, count, ids, logits);
  for (int64_t i = 0; i < count; i += LANES) {
    Weights weights = draw.weigh(load_padded(logits + i, count - i));
    for (int64_t j = i; j < std::min(i + LANES, count); j++) tokens[j] = {ids[j], weights[int(j - i)]};
  }
  if (draw.keeps_few()) {
    for (int64_t i = 0; i < count; i++) total += tokens[i].weight;
  } else {
    total = total_of(sums, count_of(draw.row.size, BLOCK));
  }
  int64_t mass = mass_of(draw.top_p, total), kept = 0, reached = 0;
  while (kept < count && reached < mass) reached += tokens[kept++].weight;
  if (reached < mass && !draw.keeps_few()) return -1;
  std::sort(tokens, tokens + kept, [](const Token& a, const Token& b) { return a.id < b.id; });
  int64_t target = target_of(draw.uniform, reached);
  const Token* token = tokens;
  while (target >= token->weight) target -= token++->weight;
  return token->id;
}

// sums: [blocks] of all tokens, unless top_k restricts the draw. They become those of the front.
int64_t draw_from_front(const Draw& draw, int64_t* sums) {
  int64_t num_blocks = count_of(draw.row.size, BLOCK);
  Row row = draw.row;
  if (draw.top_k < row.size) {
    row.front = find_front(row, draw.top_k, [](Floats) { return Ones{}; });
    sum_up(draw.weigh, row, 0, num_blocks, sums);
  }
  if (draw.top_p < 1) {
    row.front = find_front(row, mass_of(draw.top_p, total_of(sums, num_blocks)), draw.weigh);
    sum_up(draw.weigh, row, 0, num_blocks, sums);
  }
  return pick(draw.weigh, row, sums, draw.uniform);
}

int64_t draw_one(const Draw& draw, const int32_t* highest, int64_t* sums) {
  if (draw.keeps_all()) return pick(draw.weigh, draw.row, sums, draw.uniform);
  int64_t id = draw.needs_keys() ? draw_from_few(draw, highest, sums) : -1;
  return id < 0 ? draw_from_front(draw, sums) : id;
}

constexpr int64_t KEYS_OF_BLOCK = BLOCK / RANKED_BLOCK;
static_assert(BLOCK % RANKED_BLOCK == 0);

}  // namespace

int64_t draw_scratch_size(int64_t count, int64_t size) {
  return count * count_of(size, BLOCK) * int64_t(sizeof(int64_t) + KEYS_OF_BLOCK * sizeof(int32_t));
}

void draw(Team& team, const float* logits, int64_t stride, int64_t size, const float* highest, const CDraws& draws,
          int64_t* ids, void* scratch) {
  int64_t num_blocks = count_of(size, BLOCK), num_pieces = count_of(num_blocks, BLOCKS_OF_PIECE);
  int64_t* sums = static_cast<int64_t*>(scratch);                               // [count, blocks]
  int32_t* keys = reinterpret_cast<int32_t*>(sums + draws.count * num_blocks);  // [count, blocks, KEYS_OF_BLOCK]
  team.for_each_shard([&](Shard shard) {
    Span own = range_of(shard, draws.count * num_pieces);
    for (int64_t index = own.begin; index < own.end; index++) {
      int64_t i = index / num_pieces, first = index % num_pieces * BLOCKS_OF_PIECE;
      int64_t last = std::min(first + BLOCKS_OF_PIECE, num_blocks), begin = first * BLOCK;
      Draw own_draw(draws, i, logits, stride, size, highest);
      if (own_draw.needs_sums()) sum_up(own_draw.weigh, own_draw.row, first, last, sums + i * num_blocks);
      if (own_draw.needs_keys())
        rank_blocks(own_draw.row.logits + begin, std::min(last * BLOCK, size) - begin,
                    keys + (i * num_blocks + first) * KEYS_OF_BLOCK);
    }
  });
  team.for_each_shard([&](Shard shard) {
    Span own = range_of(shard, draws.count);
    for (int64_t i = own.begin; i < own.end; i++) {
      Draw own_draw(draws, i, logits, stride, size, highest);
      ids[draws.rows[i]] = draw_one(own_draw, keys + i * num_blocks * KEYS_OF_BLOCK, sums + i * num_blocks);
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

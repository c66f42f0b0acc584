#include "ranking.h"

#include <algorithm>
#include <functional>

namespace eagleray {
namespace {

typedef int32_t Half __attribute__((vector_size(32)));     // [8]
typedef int32_t Quarter __attribute__((vector_size(16)));  // [4]

// Logits that one thread takes at a time. The size does not depend on the number of threads.
constexpr int64_t PIECE = 4096;

int64_t count_of(int64_t size, int64_t each) { return (size + each - 1) / each; }

struct Piece {
  int64_t row, begin, size;
};

// Call visit(index, piece) for the pieces of all rows.
template <class Visit>
void for_pieces(Team& team, int64_t num_rows, int64_t size, Visit&& visit) {
  int64_t per_row = count_of(size, PIECE);
  team.for_each_shard([&](Shard shard) {
    Span own = range_of(shard, num_rows * per_row);
    for (int64_t index = own.begin; index < own.end; index++) {
      int64_t begin = index % per_row * PIECE;
      visit(index, Piece{index / per_row, begin, std::min(PIECE, size - begin)});
    }
  });
}

// Call visit(row) for all rows.
template <class Visit>
void for_rows(Team& team, int64_t num_rows, Visit&& visit) {
  team.for_each_shard([&](Shard shard) {
    Span own = range_of(shard, num_rows);
    for (int64_t row = own.begin; row < own.end; row++) visit(row);
  });
}

Ints higher(Ints a, Ints b) { return a > b ? a : b; }

template <class Part, class Whole>
Part fold(Whole x) {
  Part low, high;
  std::memcpy(&low, &x, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof low, sizeof high);
  return low > high ? low : high;
}

int32_t highest(Ints x) {
  auto last = fold<Quarter>(fold<Half>(x));
  return std::max(std::max(last[0], last[1]), std::max(last[2], last[3]));
}

int32_t highest_key(const float* x, int64_t size) {
  Ints best[4];
  for (Ints& lanes : best) lanes = Ints{} + INT32_MIN;
  int64_t i = 0;
  for (; i + 4 * LANES <= size; i += 4 * LANES)
    for (int part = 0; part < 4; part++) best[part] = higher(best[part], order_key(load(x + i + part * LANES)));
  int32_t rest = INT32_MIN;
  for (; i < size; i++) rest = std::max(rest, order_key(x[i]));
  return std::max(rest, highest(higher(higher(best[0], best[1]), higher(best[2], best[3]))));
}

// The first index whose key is `wanted`. There must be one.
int64_t find(const float* x, int64_t size, int32_t wanted) {
  int64_t i = 0;
  while (i + RANKED_BLOCK < size && highest_key(x + i, RANKED_BLOCK) != wanted) i += RANKED_BLOCK;
  while (order_key(x[i]) != wanted) i++;
  return i;
}

// ---- the k highest

// A logit's key in the upper half and its negated index in the lower: higher numbers come first, and all differ.
uint64_t rank_of(int32_t key, int64_t index) {
  return uint64_t(uint32_t(key) ^ 0x80000000u) << 32 | (UINT32_MAX - uint32_t(index));
}
int64_t index_of(uint64_t rank) { return UINT32_MAX - uint32_t(rank); }

// The k highest of the inserted ranks. Lower ones are pruned when the array is full.
struct TopRanks {
  int64_t k, capacity, count = 0;
  uint64_t last = 0;  // ranks up to this one are not among the k highest
  uint64_t ranks[4 * MAX_TOP_K + 64];

  explicit TopRanks(int64_t k) : k(k), capacity(4 * k + 64) {}

  void insert(uint64_t rank) {
    if (rank <= last) return;
    ranks[count++] = rank;
    if (count == capacity) prune();
  }

  void prune() {
    if (count < k) return;
    std::nth_element(ranks, ranks + k - 1, ranks + count, std::greater<uint64_t>());
    last = ranks[k - 1];
    count = k;
  }
};

// ---- masks

constexpr int64_t MASK_BITS = 32;

Ints bits_of_lanes(int64_t first) {
  Ints bits;
  for (int lane = 0; lane < LANES; lane++) bits[lane] = int32_t(uint32_t(1) << (first + lane));
  return bits;
}

// The highest keys of a part of a row, before and after its mask.
struct MaskedKeys {
  int32_t unmasked, allowed;
};

// begin, end: logits of the row; begin is a multiple of MASK_BITS.
MaskedKeys keep_allowed(float* x, int64_t begin, int64_t end, const uint32_t* mask) {
  static_assert(MASK_BITS % LANES == 0 && PIECE % MASK_BITS == 0);
  const Floats nothing = Floats{} - INFINITY;
  const Ints lowest = Ints{} + INT32_MIN, nothing_key = order_key(nothing);
  Ints unmasked = lowest, allowed = lowest;
  for (; begin + MASK_BITS <= end; begin += MASK_BITS) {
    uint32_t word = mask[begin / MASK_BITS];
    for (int64_t first = 0; first < MASK_BITS; first += LANES) {
      Floats logits = load(x + begin + first);
      Ints keys = order_key(logits), forbidden = ((Ints{} + int32_t(word)) & bits_of_lanes(first)) == 0;
      unmasked = higher(unmasked, keys);
      allowed = higher(allowed, forbidden ? nothing_key : keys);
      if (word != UINT32_MAX) store(x + begin + first, forbidden ? nothing : logits);
    }
  }
  MaskedKeys keys{highest(unmasked), highest(allowed)};
  for (; begin < end; begin++) {
    keys.unmasked = std::max(keys.unmasked, order_key(x[begin]));
    if (!(mask[begin / MASK_BITS] >> begin % MASK_BITS & 1)) x[begin] = -INFINITY;
    keys.allowed = std::max(keys.allowed, order_key(x[begin]));
  }
  return keys;
}

// The mask of a row, or null.
struct RowMasks {
  const int64_t* rows;  // [count], ascending
  int64_t count;
  const int32_t* masks;
  int64_t words;  // of a mask

  const uint32_t* operator[](int64_t row) const {
    const int64_t* found = std::lower_bound(rows, rows + count, row);
    if (found == rows + count || *found != row) return nullptr;
    return reinterpret_cast<const uint32_t*>(masks) + (found - rows) * words;
  }
};

// ---- the highest

// keys: [num_rows, pieces], the highest of each piece.
void find_highest(Team& team, const float* logits, int64_t stride, int64_t num_rows, int64_t size, const int32_t* keys,
                  int64_t* ids, float* values) {
  int64_t num_pieces = count_of(size, PIECE);
  for_rows(team, num_rows, [&](int64_t row) {
    const int32_t* own = keys + row * num_pieces;
    int64_t piece = std::max_element(own, own + num_pieces) - own, begin = piece * PIECE;
    const float* x = logits + row * stride;
    ids[row] = begin + find(x + begin, std::min(PIECE, size - begin), own[piece]);
    values[row] = x[ids[row]];
  });
}

}  // namespace

void rank_blocks(const float* x, int64_t size, int32_t* highest) {
  int64_t i = 0;
  for (; i + RANKED_BLOCK <= size; i += RANKED_BLOCK) *highest++ = highest_key(x + i, RANKED_BLOCK);
  if (i < size) *highest = highest_key(x + i, size - i);
}

// The k highest logits are in the k highest blocks, because each of these has a logit that precedes all logits of every
// other block.
void top_k_of_row(const float* row, int64_t size, const int32_t* highest, int64_t k, int32_t* ids, float* values) {
  int64_t num_blocks = count_of(size, RANKED_BLOCK);
  TopRanks blocks(std::min(k, num_blocks)), top(k);
  for (int64_t block = 0; block < num_blocks; block++) blocks.insert(rank_of(highest[block], block));
  blocks.prune();
  if (num_blocks >= k) top.last = blocks.last & ~uint64_t(UINT32_MAX);  // below the highest logits of k blocks
  for (int64_t i = 0; i < blocks.count; i++) {
    int64_t begin = index_of(blocks.ranks[i]) * RANKED_BLOCK, end = std::min(begin + RANKED_BLOCK, size);
    for (int64_t id = begin; id < end; id++) top.insert(rank_of(order_key(row[id]), id));
  }
  top.prune();
  std::sort(top.ranks, top.ranks + k, std::greater<uint64_t>());
  for (int64_t i = 0; i < k; i++) {
    ids[i] = int32_t(index_of(top.ranks[i]));
    values[i] = row[ids[i]];
  }
}

int64_t ranking_scratch_size(int64_t num_rows, int64_t size) {
  int64_t blocks = count_of(size, RANKED_BLOCK), pieces = count_of(size, PIECE);
  return num_rows * std::max(blocks, 2 * pieces) * int64_t(sizeof(int32_t));
}

void argmax(Team& team, const float* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t* ids,
            float* values, void* scratch) {
  int32_t* keys = static_cast<int32_t*>(scratch);  // [num_rows, pieces]
  for_pieces(team, num_rows, size, [&](int64_t index, Piece piece) {
    keys[index] = highest_key(logits + piece.row * stride + piece.begin, piece.size);
  });
  find_highest(team, logits, stride, num_rows, size, keys, ids, values);
}

void top_k(Team& team, const float* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t k,
           int32_t* ids, float* values, void* scratch) {
  int32_t* highest = static_cast<int32_t*>(scratch);  // [num_rows, blocks]
  int64_t num_blocks = count_of(size, RANKED_BLOCK);
  for_pieces(team, num_rows, size, [&](int64_t, Piece piece) {
    int32_t* to = highest + piece.row * num_blocks + piece.begin / RANKED_BLOCK;
    rank_blocks(logits + piece.row * stride + piece.begin, piece.size, to);
  });
  for_rows(team, num_rows, [&](int64_t row) {
    top_k_of_row(logits + row * stride, size, highest + row * num_blocks, k, ids + row * k, values + row * k);
  });
}

void argmax_allowed(Team& team, float* logits, int64_t stride, int64_t num_rows, int64_t size, const int64_t* rows,
                    int64_t num_masks, const int32_t* masks, int64_t* ids, float* values, float* unmasked,
                    void* scratch) {
  const RowMasks row_masks{rows, num_masks, masks, count_of(size, MASK_BITS)};
  int64_t num_pieces = count_of(size, PIECE);
  int32_t* allowed_keys = static_cast<int32_t*>(scratch);        // [num_rows, pieces]
  int32_t* unmasked_keys = allowed_keys + num_rows * num_pieces;  // the same
  for_pieces(team, num_rows, size, [&](int64_t index, Piece piece) {
    float* row = logits + piece.row * stride;
    if (const uint32_t* mask = row_masks[piece.row]) {
      MaskedKeys keys = keep_allowed(row, piece.begin, piece.begin + piece.size, mask);
      allowed_keys[index] = keys.allowed;
      unmasked_keys[index] = keys.unmasked;
    } else {
      allowed_keys[index] = unmasked_keys[index] = highest_key(row + piece.begin, piece.size);
    }
  });
  find_highest(team, logits, stride, num_rows, size, allowed_keys, ids, values);
  for_rows(team, num_rows, [&](int64_t row) {
    const int32_t* own = unmasked_keys + row * num_pieces;
    unmasked[row] = number_of(*std::max_element(own, own + num_pieces));
  });
}

}  // namespace eagleray

using namespace eagleray;

extern "C" {

int64_t er_ranking_scratch_size(int64_t num_rows, int64_t size) { return ranking_scratch_size(num_rows, size); }

void er_argmax(const float* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t* ids, float* values,
               void* scratch, int num_threads) {
  run_team(num_threads, [&](Team& team) { argmax(team, logits, stride, num_rows, size, ids, values, scratch); });
}

void er_argmax_allowed(float* logits, int64_t stride, int64_t num_rows, int64_t size, const int64_t* rows,
                       int64_t num_masks, const int32_t* masks, int64_t* ids, float* values, float* unmasked,
                       void* scratch, int num_threads) {
  run_team(num_threads, [&](Team& team) {
    argmax_allowed(team, logits, stride, num_rows, size, rows, num_masks, masks, ids, values, unmasked, scratch);
  });
}

void er_top_k(const float* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t k, int32_t* ids,
              float* values, void* scratch, int num_threads) {
  run_team(num_threads, [&](Team& team) { top_k(team, logits, stride, num_rows, size, k, ids, values, scratch); });
}

}  // extern "C"

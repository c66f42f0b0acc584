#include "ranking.h"

#include <algorithm>
#include <functional>

namespace eagleray {
namespace {

typedef int32_t Half __attribute__((vector_size(32)));     // [8]
typedef int32_t Quarter __attribute__((vector_size(16)));  // [4]

// What one thread does at a time. It is the same however many threads there are, and so are the sums.
constexpr int64_t PIECE = 4096;
// `top_k` looks into the k blocks with the highest logits.
constexpr int64_t BLOCK = 64;

int64_t count_of(int64_t size, int64_t each) { return (size + each - 1) / each; }

struct Piece {
  int64_t row, begin, size;
};

// visit(index, piece) for the pieces of all rows.
template <class Visit>
void for_pieces(Crew& crew, int64_t num_rows, int64_t size, Visit&& visit) {
  int64_t per_row = count_of(size, PIECE);
  crew.each([&](Team team) {
    Span own = share(team, num_rows * per_row);
    for (int64_t index = own.begin; index < own.end; index++) {
      int64_t begin = index % per_row * PIECE;
      visit(index, Piece{index / per_row, begin, std::min(PIECE, size - begin)});
    }
  });
}

// visit(row)
template <class Visit>
void for_rows(Crew& crew, int64_t num_rows, Visit&& visit) {
  crew.each([&](Team team) {
    Span own = share(team, num_rows);
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

int32_t highest_order(const float* x, int64_t size) {
  Ints best[4];
  for (Ints& lanes : best) lanes = Ints{} + INT32_MIN;
  int64_t i = 0;
  for (; i + 4 * LANES <= size; i += 4 * LANES)
    for (int part = 0; part < 4; part++) best[part] = higher(best[part], order(load(x + i + part * LANES)));
  int32_t rest = INT32_MIN;
  for (; i < size; i++) rest = std::max(rest, order(x[i]));
  return std::max(rest, highest(higher(higher(best[0], best[1]), higher(best[2], best[3]))));
}

// The first of this order, which is there.
int64_t find(const float* x, int64_t size, int32_t wanted) {
  int64_t i = 0;
  while (i + BLOCK < size && highest_order(x + i, BLOCK) != wanted) i += BLOCK;
  while (order(x[i]) != wanted) i++;
  return i;
}

// ---- the first k

// A logit's order above, its place below, counted down: the higher number comes first, and no two are equal.
uint64_t rank_of(int32_t order, int64_t place) {
  return uint64_t(uint32_t(order) ^ 0x80000000u) << 32 | (UINT32_MAX - uint32_t(place));
}
int64_t place_of(uint64_t rank) { return UINT32_MAX - uint32_t(rank); }

// The k highest of the ranks that it is offered. Now and then it drops those that are behind.
struct Front {
  int64_t k, capacity, count = 0;
  uint64_t last = 0;  // ranks up to this one are behind
  uint64_t ranks[4 * MAX_TOP_K + 64];

  explicit Front(int64_t k) : k(k), capacity(4 * k + 64) {}

  void offer(uint64_t rank) {
    if (rank <= last) return;
    ranks[count++] = rank;
    if (count == capacity) drop();
  }

  void drop() {
    if (count < k) return;
    std::nth_element(ranks, ranks + k - 1, ranks + count, std::greater<uint64_t>());
    last = ranks[k - 1];
    count = k;
  }
};

// highest: of each block of the row. The k first are in the k first blocks: each block before another one has a logit
// that comes before all of the other's.
void first_of_row(const float* row, int64_t size, const int32_t* highest, int64_t k, int32_t* ids, float* values) {
  int64_t num_blocks = count_of(size, BLOCK);
  Front blocks(std::min(k, num_blocks)), front(k);
  for (int64_t block = 0; block < num_blocks; block++) blocks.offer(rank_of(highest[block], block));
  blocks.drop();
  if (num_blocks >= k) front.last = blocks.last & ~uint64_t(UINT32_MAX);  // what is lower than k blocks' highest
  for (int64_t i = 0; i < blocks.count; i++) {
    int64_t begin = place_of(blocks.ranks[i]) * BLOCK, end = std::min(begin + BLOCK, size);
    for (int64_t id = begin; id < end; id++) front.offer(rank_of(order(row[id]), id));
  }
  front.drop();
  std::sort(front.ranks, front.ranks + k, std::greater<uint64_t>());
  for (int64_t i = 0; i < k; i++) {
    ids[i] = int32_t(place_of(front.ranks[i]));
    values[i] = row[ids[i]];
  }
}

}  // namespace

int64_t ranking_scratch_size(int64_t num_rows, int64_t size) {
  return num_rows * count_of(size, BLOCK) * int64_t(sizeof(int32_t));
}

void argmax(Crew& crew, const float* logits, int64_t stride, int64_t num_rows, int64_t size, int32_t* ids,
            float* values, void* scratch) {
  int32_t* highest = static_cast<int32_t*>(scratch);  // [num_rows, pieces]
  for_pieces(crew, num_rows, size, [&](int64_t index, Piece piece) {
    highest[index] = highest_order(logits + piece.row * stride + piece.begin, piece.size);
  });
  int64_t num_pieces = count_of(size, PIECE);
  for_rows(crew, num_rows, [&](int64_t row) {
    const int32_t* orders = highest + row * num_pieces;
    int64_t piece = std::max_element(orders, orders + num_pieces) - orders, begin = piece * PIECE;
    const float* x = logits + row * stride;
    ids[row] = int32_t(begin + find(x + begin, std::min(PIECE, size - begin), orders[piece]));
    values[row] = x[ids[row]];
  });
}

void top_k(Crew& crew, const float* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t k,
           int32_t* ids, float* values, void* scratch) {
  int32_t* highest = static_cast<int32_t*>(scratch);  // [num_rows, blocks]
  int64_t num_blocks = count_of(size, BLOCK);
  for_pieces(crew, num_rows, size, [&](int64_t, Piece piece) {
    const float* x = logits + piece.row * stride + piece.begin;
    int32_t* to = highest + piece.row * num_blocks + piece.begin / BLOCK;
    int64_t i = 0;
    for (; i + BLOCK <= piece.size; i += BLOCK) *to++ = highest_order(x + i, BLOCK);
    if (i < piece.size) *to = highest_order(x + i, piece.size - i);
  });
  for_rows(crew, num_rows, [&](int64_t row) {
    first_of_row(logits + row * stride, size, highest + row * num_blocks, k, ids + row * k, values + row * k);
  });
}

}  // namespace eagleray

// ---- for tests and measurements. `scratch` has `er_ranking_scratch_size` bytes.

using namespace eagleray;

extern "C" {

int64_t er_ranking_scratch_size(int64_t num_rows, int64_t size) { return ranking_scratch_size(num_rows, size); }

void er_argmax(const float* logits, int64_t stride, int64_t num_rows, int64_t size, int32_t* ids, float* values,
               void* scratch, int num_threads) {
  run_crew(num_threads, [&](Crew& crew) { argmax(crew, logits, stride, num_rows, size, ids, values, scratch); });
}

void er_top_k(const float* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t k, int32_t* ids,
              float* values, void* scratch, int num_threads) {
  run_crew(num_threads, [&](Crew& crew) { top_k(crew, logits, stride, num_rows, size, k, ids, values, scratch); });
}

}  // extern "C"

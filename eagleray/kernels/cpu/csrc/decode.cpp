// Decode steps: from the table of requests to their next tokens in one call.
//
// A step is the sequence of calls that Python makes for any other step, `er_run`, `er_multiply`, `er_argmax` and
// `er_draw`, so its tokens are the same to the last bit. What it saves is the way through Python, numpy and torch between
// them: a pass replaces what the processor has in its caches, after which that takes longer than a small model.
#include <algorithm>
#include <memory>
#include <vector>

#include "draw.h"
#include "ranking.h"

namespace eagleray {
namespace {

constexpr uint64_t GOLDEN_GAMMA = 0x9E3779B97F4A7C15u;

uint64_t mix(uint64_t state) {
  state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
  state = (state ^ state >> 27) * 0x94D049BB133111EBu;
  return state ^ state >> 31;
}

// The number of (0, 1) by which a stream draws the token at a position, see worker/random_sampler.py.
double uniform(uint64_t stream, int64_t position) {
  uint64_t bits = mix(stream + (uint64_t(position) + 1) * GOLDEN_GAMMA);
  return (double(bits >> 12) + 0.5) * 0x1p-52;
}

// Memory without initial values.
template <class Number>
std::unique_ptr<Number[]> allocate(int64_t size) { return std::unique_ptr<Number[]>(new Number[size_t(size)]); }

struct Rows {
  const CDecodeTable& table;
  const int64_t* rows;
  int64_t count;
};

bool serves(const CDecode& step, const Rows& own) {
  const CDecodeTable& table = own.table;
  for (int64_t i = 0; i < own.count; i++) {
    int64_t row = own.rows[i], num_tokens = table.num_tokens[row], features = table.features[row];
    if (table.num_computed[row] + 1 != num_tokens || num_tokens > step.max_context) return false;
    if (num_tokens >= table.token_stride) return false;  // no room for another token
    if (features && features != table.random) return false;
  }
  return true;
}

// The numbers of a batch that computes the last known token of each row.
struct DecodeBatch {
  explicit DecodeBatch(const Rows& own) : num_rows(own.count) {
    const CDecodeTable& table = own.table;
    for (int64_t i = 0; i < num_rows; i++)
      table_stride = std::max(table_stride, divide_up(table.num_tokens[own.rows[i]], table.block_size));
    numbers = allocate<int32_t>(num_rows * (5 + table_stride) + 1);
    for (int64_t i = 0; i < num_rows; i++) {
      int64_t row = own.rows[i], num_tokens = table.num_tokens[row], position = num_tokens - 1;
      const int32_t* blocks = table.block_table + row * table.table_stride;
      token_ids()[i] = table.token_ids[row * table.token_stride + position];
      positions()[i] = int32_t(position);
      slots()[i] = int32_t(blocks[position / table.block_size] * table.block_size + position % table.block_size);
      seq_lens()[i] = int32_t(num_tokens);
      starts()[i] = int32_t(i);
      std::copy(blocks, blocks + table_stride, block_table() + i * table_stride);
    }
    starts()[num_rows] = int32_t(num_rows);
  }

  void set(CBatch& batch) const {
    batch.metadata = {num_rows, num_rows, starts(), seq_lens(), block_table(), table_stride, positions(), slots()};
    batch.token_ids = token_ids();
    batch.num_adapter_groups = 0;
  }

  int32_t* token_ids() const { return numbers.get(); }
  int32_t* positions() const { return numbers.get() + num_rows; }
  int32_t* slots() const { return numbers.get() + 2 * num_rows; }
  int32_t* seq_lens() const { return numbers.get() + 3 * num_rows; }
  int32_t* starts() const { return numbers.get() + 4 * num_rows; }  // [num_rows + 1]
  int32_t* block_table() const { return numbers.get() + 5 * num_rows + 1; }

  int64_t num_rows, table_stride = 0;
  std::unique_ptr<int32_t[]> numbers;
};

// Draw the tokens of those of the rows that draw and have a finite highest logit, into `ids`.
void draw_some(const Rows& own, const float* logits, int64_t size, const float* highest, int64_t* ids, int threads) {
  const CDecodeTable& table = own.table;
  std::vector<int64_t> indices, least_weights, top_k;
  std::vector<float> temperature;
  std::vector<double> uniforms, top_p;
  for (int64_t i = 0; i < own.count; i++) {
    int64_t row = own.rows[i];
    if (!table.features[row] || !std::isfinite(highest[i])) continue;
    indices.push_back(i);
    temperature.push_back(table.temperature[row]);
    uniforms.push_back(uniform(uint64_t(table.streams[row]), table.num_tokens[row]));
    least_weights.push_back(int64_t(std::ceil(table.min_p[row] * double(int64_t(1) << DRAW_ONE_BITS))));
    top_k.push_back(table.top_k[row]);
    top_p.push_back(table.top_p[row]);
  }
  if (indices.empty()) return;
  CDraws draws{int64_t(indices.size()), indices.data(), temperature.data(), uniforms.data(),
               least_weights.data(),    top_k.data(),   top_p.data()};
  auto scratch = allocate<int64_t>(divide_up(draw_scratch_size(draws.count, size), sizeof(int64_t)));
  run_team(threads, [&](Team& team) { draw(team, logits, size, size, highest, draws, ids, scratch.get()); });
}

}  // namespace
}  // namespace eagleray

using namespace eagleray;

extern "C" int er_decode(const CDecode* step, const int64_t* rows, int64_t num_rows, float* logits, int64_t* next) {
  const CDecodeTable& table = step->table;
  Rows own{table, rows, num_rows};
  if (!serves(*step, own)) return 0;
  DecodeBatch batch(own);
  batch.set(*step->batch);
  er_run(int(step->dtype), step->ops, step->num_ops, step->buffers, step->batch, int(step->pass_threads));
  CProduct head = step->head;
  const CBuffer& hidden = step->buffers[step->hidden];
  head.x = hidden.memory, head.x_stride = hidden.stride, head.num_rows = num_rows, head.y = logits;
  er_multiply(&head, 1, int(step->dtype), int(step->head_threads));
  auto highest = allocate<float>(num_rows);
  auto scratch = allocate<int64_t>(divide_up(ranking_scratch_size(num_rows, head.n), sizeof(int64_t)));
  run_team(int(step->ranking_threads), [&](Team& team) {
    argmax(team, logits, head.n, num_rows, head.n, next, highest.get(), scratch.get());
  });
  draw_some(own, logits, head.n, highest.get(), next, int(step->draw_threads));
  for (int64_t i = 0; i < num_rows; i++) {
    int64_t row = rows[i];
    if (!std::isfinite(highest[i])) next[i] = -1;
    table.token_ids[row * table.token_stride + table.num_tokens[row]] = int32_t(std::max<int64_t>(next[i], 0));
    table.num_tokens[row]++;
    table.num_computed[row]++;
  }
  return 1;
}

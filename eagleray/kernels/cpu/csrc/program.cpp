// The forward pass of a model: a list of steps that one crew of threads runs from front to back.
//
// Steps name the rows that they read and write by number: row buffers, of which the caller says for each run where they
// are. What depends on the batch comes with each run too; all else is in the steps. `abi.py` mirrors these structs.
#include "attention.h"
#include "experts.h"
#include "product.h"
#include "rows.h"

namespace eagleray {

enum class Operation : int64_t { embed, normalize, multiply, attend, mix, add, clear, round };

struct Step {
  Operation operation;
  const void* what;  // the struct of that name
};

struct Rowbuffer {
  void* memory;
  int64_t stride;  // elements
};

struct Embed {
  int64_t out;  // float
  const void* values;
  int64_t is_packed, size, first, num_own;
};

struct Normalize {
  int64_t x, out;  // float -> T
  int64_t size;
  const float* weight;
  float eps;
};

struct Multiply {
  int64_t x, out;
  int64_t n, k, ending;
  Clamp clamp;
  const void* weight;
  const float* bias;
};

struct Attend {
  int64_t qkv, queries, out;  // float, T, T
  AttentionShape shape;
  const float *q_norm, *k_norm;
  float eps;
  void* cache;
};

struct Mix {
  int64_t x, scores, hidden;  // T, float, float
  Mixture mixture;
  Experts experts;
  SlotMap map;
  int64_t* counts;
  Trace trace;
};

struct RowsToRows {  // add, clear, round
  int64_t x, out, size;
};

struct Batch {
  Rows rows;
  const int32_t* token_ids;
  const float *cos, *sin;  // [positions, head_dim / 2]
  void* attention_scratch;
  void* expert_scratch;
  int64_t expert_tokens;  // for how many it is enough
  int32_t* expert_ids;    // [num_tokens, top_k] memory for those that a layer chooses
};

namespace {

template <class T>
class Run {
 public:
  Run(Crew& crew, const Rowbuffer* buffers, const Batch& batch)
      : crew_(crew), buffers_(buffers), batch_(batch), num_tokens_(batch.rows.num_tokens) {}

  void step(const Step& step) const {
    switch (step.operation) {
      case Operation::embed: return embed(*static_cast<const Embed*>(step.what));
      case Operation::normalize: return normalize(*static_cast<const Normalize*>(step.what));
      case Operation::multiply: return multiply(*static_cast<const Multiply*>(step.what));
      case Operation::attend: return attend(*static_cast<const Attend*>(step.what));
      case Operation::mix: return mix(*static_cast<const Mix*>(step.what));
      case Operation::add: return add(*static_cast<const RowsToRows*>(step.what));
      case Operation::clear: return clear(*static_cast<const RowsToRows*>(step.what));
      case Operation::round: return round(*static_cast<const RowsToRows*>(step.what));
    }
  }

 private:
  template <class Number>
  Number* rows(int64_t buffer) const { return static_cast<Number*>(buffers_[buffer].memory); }
  int64_t stride(int64_t buffer) const { return buffers_[buffer].stride; }

  void embed(const Embed& what) const {
    Table<T> table{static_cast<const T*>(what.values), what.is_packed ? Layout::packed : Layout::plain, what.size,
                   what.first, what.num_own};
    crew_.each([&](Team team) { eagleray::embed(team, table, batch_.token_ids, num_tokens_, rows<float>(what.out)); });
  }

  void normalize(const Normalize& what) const {
    crew_.each([&](Team team) {
      eagleray::normalize(team, rows<float>(what.x), stride(what.x), num_tokens_, what.size, what.weight, what.eps,
                          rows<T>(what.out), stride(what.out));
    });
  }

  void multiply(const Multiply& what) const {
    Product<T> product{rows<T>(what.x), stride(what.x), nullptr, num_tokens_, static_cast<const T*>(what.weight), what.n,
                       what.k, what.bias, Ending(what.ending), what.clamp, rows<void>(what.out), stride(what.out)};
    crew_.each([&](Team team) { eagleray::multiply(team, product); });
  }

  void attend(const Attend& what) const {
    T* cache = static_cast<T*>(what.cache);
    T* queries = rows<T>(what.queries);
    crew_.each([&](Team team) {
      prepare(team, what.shape, batch_.rows, rows<float>(what.qkv), what.q_norm, what.k_norm, what.eps, batch_.cos,
              batch_.sin, queries, cache);
    });
    crew_.each([&](Team team) {
      eagleray::attend(team, what.shape, batch_.rows, queries, cache, rows<T>(what.out),
                       static_cast<float*>(batch_.attention_scratch));
    });
  }

  void mix(const Mix& what) const {
    ExpertRows<T> tokens{num_tokens_, rows<T>(what.x), stride(what.x)};
    RoutedRows routed{rows<float>(what.scores), stride(what.scores), rows<float>(what.hidden), stride(what.hidden),
                      batch_.expert_ids, what.trace};
    compute_experts(crew_, what.mixture, what.experts, what.map, tokens, routed, what.counts,
                    {batch_.expert_scratch, batch_.expert_tokens});
  }

  void add(const RowsToRows& what) const {
    crew_.each([&](Team team) {
      eagleray::add(team, rows<float>(what.x), stride(what.x), num_tokens_, what.size, rows<float>(what.out),
                    stride(what.out));
    });
  }

  void clear(const RowsToRows& what) const {
    crew_.each([&](Team team) {
      Span own = share(team, num_tokens_);
      float* out = rows<float>(what.out) + own.begin * stride(what.out);
      std::memset(out, 0, size_t((own.end - own.begin) * stride(what.out)) * sizeof(float));
    });
  }

  void round(const RowsToRows& what) const {
    crew_.each([&](Team team) {
      eagleray::round(team, rows<float>(what.x), stride(what.x), num_tokens_, what.size, rows<T>(what.out),
                      stride(what.out));
    });
  }

  Crew& crew_;
  const Rowbuffer* buffers_;
  const Batch& batch_;
  int64_t num_tokens_;
};

template <class T>
void run(const Step* steps, int64_t count, const Rowbuffer* buffers, const Batch& batch, int num_threads) {
  run_crew(num_threads, [&](Crew& crew) {
    Run<T> one(crew, buffers, batch);
    for (int64_t i = 0; i < count; i++) one.step(steps[i]);
  });
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// dtype: 0 is float32, 1 bfloat16.
EXPORT void er_run(int dtype, const Step* steps, int64_t count, const Rowbuffer* buffers, const Batch* batch,
                   int num_threads) {
  (dtype ? run<Bf16> : run<float>)(steps, count, buffers, *batch, num_threads);
}

// Bytes.
EXPORT int64_t er_attention_scratch(const AttentionShape* shape, int64_t max_context, int num_threads) {
  return attend_scratch(*shape, max_context, num_threads) * int64_t(sizeof(float));
}

}  // namespace eagleray

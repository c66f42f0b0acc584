// A program: the operations of a recorded forward pass, which one team of threads runs in order.
//
// Operations name their inputs and outputs by the numbers of buffers; each run says where the buffers are. Everything
// that depends on the batch comes with each run, everything else is in the operations.
#include <optional>

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "mla.h"
#include "product.h"
#include "rows.h"

namespace eagleray {

namespace {

template <class T>
class Program {
 public:
  Program(Team& team, const CBuffer* buffers, const CBatch& batch)
      : team_(team), buffers_(buffers), batch_(batch), num_tokens_(batch.metadata.num_tokens) {}

  void run(const COp& op) const {
    switch (op.operation) {
      case OP_EMBED: return embed(*static_cast<const CEmbed*>(op.args));
      case OP_NORMALIZE: return normalize(*static_cast<const CNormalize*>(op.args));
      case OP_MULTIPLY: return multiply(*static_cast<const CMultiply*>(op.args));
      case OP_ATTEND: return attend(*static_cast<const CAttend*>(op.args));
      case OP_ATTEND_MLA: return attend_mla(*static_cast<const CAttendMLA*>(op.args));
      case OP_COMPUTE_EXPERTS: return compute_experts(*static_cast<const CComputeExperts*>(op.args));
      case OP_ADD: return add(*static_cast<const CElementwise*>(op.args));
      case OP_CLEAR: return clear(*static_cast<const CElementwise*>(op.args));
      case OP_ROUND: return round(*static_cast<const CElementwise*>(op.args));
    }
  }

 private:
  template <class Number>
  Number* rows(int64_t buffer) const { return static_cast<Number*>(buffers_[buffer].memory); }
  int64_t stride(int64_t buffer) const { return buffers_[buffer].stride; }

  void embed(const CEmbed& args) const {
    EmbeddingTable<T> table{static_cast<const T*>(args.values), bool(args.is_packed), args.grouping, args.size,
                            args.first, args.num_own};
    team_.for_each_shard([&](Shard shard) {
      eagleray::embed(shard, table, batch_.token_ids, num_tokens_, rows<float>(args.out));
    });
  }

  void normalize(const CNormalize& args) const {
    team_.for_each_shard([&](Shard shard) {
      eagleray::normalize(shard, rows<float>(args.x), stride(args.x), num_tokens_, args.size, args.weight, args.eps,
                          rows<T>(args.out), stride(args.out));
    });
  }

  void multiply(const CMultiply& args) const {
    Product<T> product{rows<T>(args.x), stride(args.x), nullptr, num_tokens_, static_cast<const T*>(args.weight),
                       args.n, args.k, args.bias, args.epilogue, args.swiglu, rows<void>(args.out), stride(args.out),
                       args.grouping};
    std::optional<AdaptedRows<T>> adapted;
    if (args.adapters && batch_.num_adapter_groups) adapted.emplace(args, batch_);
    if (adapted && !adapted->is_empty()) {
      product.adapters = &*adapted;
      team_.for_each_shard([&](Shard shard) { shrink(shard, *adapted, product.x, product.x_stride); });
    }
    team_.for_each_shard([&](Shard shard) { eagleray::multiply(shard, product); });
  }

  void attend(const CAttend& args) const {
    T* queries = rows<T>(args.queries);
    team_.for_each_shard([&](Shard shard) {
      prepare(shard, args.params, batch_.metadata, rows<float>(args.qkv), args.q_norm, args.k_norm, args.eps,
              batch_.cos, batch_.sin, queries, args.cache);
    });
    team_.for_each_shard([&](Shard shard) {
      eagleray::attend(shard, args.params, batch_.metadata, queries, args.cache, rows<T>(args.out),
                       static_cast<float*>(batch_.attention_scratch));
    });
  }

  void attend_mla(const CAttendMLA& args) const {
    const CMLAScratch& scratch = batch_.mla_scratch;
    eagleray::attend_mla(team_, args.params, batch_.metadata,
                         {rows<float>(args.queries), rows<float>(args.latents), batch_.cos, batch_.sin},
                         rows<T>(args.prepared), static_cast<T*>(args.cache), rows<T>(args.out),
                         MLAScratch<T>{scratch.splits, static_cast<T*>(scratch.latents), scratch.max_tokens});
  }

  void compute_experts(const CComputeExperts& args) const {
    ExpertRows<T> tokens{num_tokens_, rows<T>(args.x), stride(args.x)};
    CRoutedTokens routed{rows<float>(args.scores), stride(args.scores), rows<float>(args.hidden), stride(args.hidden),
                      batch_.expert_ids, args.trace};
    eagleray::compute_experts(team_, args.router, args.experts, args.slot_map, tokens, routed, args.counts,
                    {batch_.expert_scratch, batch_.expert_tokens});
  }

  void add(const CElementwise& args) const {
    team_.for_each_shard([&](Shard shard) {
      eagleray::add(shard, rows<float>(args.x), stride(args.x), num_tokens_, args.size, rows<float>(args.out),
                    stride(args.out));
    });
  }

  void clear(const CElementwise& args) const {
    team_.for_each_shard([&](Shard shard) {
      Span own = range_of(shard, num_tokens_);
      float* out = rows<float>(args.out) + own.begin * stride(args.out);
      std::memset(out, 0, size_t((own.end - own.begin) * stride(args.out)) * sizeof(float));
    });
  }

  void round(const CElementwise& args) const {
    team_.for_each_shard([&](Shard shard) {
      eagleray::round(shard, rows<float>(args.x), stride(args.x), num_tokens_, args.size, rows<T>(args.out),
                      stride(args.out));
    });
  }

  Team& team_;
  const CBuffer* buffers_;
  const CBatch& batch_;
  int64_t num_tokens_;
};

template <class T>
void run(const COp* ops, int64_t count, const CBuffer* buffers, const CBatch& batch, int num_threads) {
  run_team(num_threads, [&](Team& team) {
    Program<T> program(team, buffers, batch);
    for (int64_t i = 0; i < count; i++) program.run(ops[i]);
  });
}

}  // namespace

OpenMp openmp;

}  // namespace eagleray

using namespace eagleray;

extern "C" {

void er_run(int dtype, const COp* ops, int64_t count, const CBuffer* buffers, const CBatch* batch, int num_threads) {
  (dtype ? run<Bf16> : run<float>)(ops, count, buffers, *batch, num_threads);
}

void er_use_openmp(void* parallel, void* set_dynamic, void* get_num_threads) {
  openmp = {reinterpret_cast<decltype(OpenMp::parallel)>(parallel),
            reinterpret_cast<decltype(OpenMp::set_dynamic)>(set_dynamic),
            reinterpret_cast<decltype(OpenMp::num_threads)>(get_num_threads)};
}

const char* er_abi_fingerprint() { return ABI_FINGERPRINT; }

}  // extern "C"

// The C interface of the CPU kernels: the constants, structs and functions that Python shares with the C++ sources.
//
// Nothing in this file is declared a second time. The sources include it, so the compiler checks every definition
// against it; `abi.py` reads it and derives its ctypes structs and function types. The library reports the hash of the
// file that it was compiled with, and Python refuses a library whose hash differs from that of the file it read.
//
// The file is plain C, restricted to what `abi.py` understands: line comments, anonymous enums, structs of scalars,
// pointers and structs defined above, and functions named er_*. One variable per declaration.
//
// Flags and numbers of a list of constants are int64_t in structs and int in arguments. A `dtype` is one of DTYPE_*.
// A stride is a number of elements.
#pragma once

#include <stdint.h>

// Compute with the threads of an OpenMP runtime, the addresses of whose functions GOMP_parallel, omp_set_dynamic and
// omp_get_num_threads these are. The library is linked with no runtime, and more than one thread needs this call first.
void er_use_openmp(void* parallel, void* set_dynamic, void* get_num_threads);

enum { DTYPE_FLOAT32, DTYPE_BFLOAT16 };

enum { NUM_LANES = 16 };      // of a vector: 16 floats
enum { PANEL_ROWS = 32 };     // of a packed weight: the unit of its layout
enum { MAX_HEAD_DIM = 256 };  // features of an attention head
enum { MAX_TOP_K = 256 };     // of `er_top_k`

// ---- matrix products

// The last operation on a product's result, before it is written. Gated epilogues require a weight that
// `er_pack_gate_up` packed.
enum {
  EPILOGUE_STORE,           // float y = result
  EPILOGUE_ADD,             // float y += result
  EPILOGUE_ROUND,           // T y = result
  EPILOGUE_SILU,            // T y[row, j] = silu(gate j) * up j
  EPILOGUE_CLAMPED_SWIGLU,  // T y[row, j] = gate * sigmoid(alpha * gate) * (up + 1), with gate j at most `limit`, and
                          // up j between -limit and limit
};

typedef struct {
  float alpha;
  float limit;
} CClampedSwiglu;

enum { SCALE_FLOAT16, SCALE_BFLOAT16, SCALE_FLOAT32 };

enum { MAX_MULTIPLE = 15 };  // of scales in a block, see CGrouping

// The codes of a weight of few bits. A group of consecutive inputs of an output shares a scale, and perhaps an offset:
// a number of the weight is scale * value + offset.
typedef struct {
  int64_t bits;         // of a code: 4 or 8
  int64_t size;         // inputs of a group: 16, 32, 64, 128 or 256; k is a multiple of it
  int64_t scale_kind;   // of scales and offsets: SCALE_*
  int64_t has_offsets;
  int64_t block;        // inputs of a block, whose groups have scales that are multiples, at most MAX_MULTIPLE times, of one
                        // number; `size` if a block is a single group. k is a multiple of it
  int64_t are_integers; // whether values are consecutive integers, or, of 8 bits, integers and a half
  const void* values;   // bfloat16: [16] of the codes of 4 bits; [128] of the lower seven of 8 bits, where the eighth is
                        // the sign of the value
} CGrouping;

typedef struct {
  const void* x;          // T [*, k]; if k is odd, a zero follows each row of bfloat16
  int64_t x_stride;
  const int32_t* x_rows;  // row i of the product is row x_rows[i] of x; null: row i
  int64_t num_rows;
  const void* weight;     // T, packed
  int64_t n;              // outputs; if gated 2 * inner, whatever `inner` was padded to
  int64_t k;
  const float* bias;      // [n], if gated the bias of gate and then that of up; null: no bias
  int64_t epilogue;
  CClampedSwiglu swiglu;  // of EPILOGUE_CLAMPED_SWIGLU
  void* y;                // [num_rows, n], or if gated [num_rows, inner], of the type that the epilogue says
  int64_t y_stride;
  const CGrouping* grouping;  // of a weight that `er_pack_grouped` packed, for x of bfloat16; null: T, packed
} CProduct;

// The number of elements of a packed weight of n outputs.
int64_t er_packed_size(int64_t n, int64_t k, int dtype);

// weight: [n, k]
void er_pack(const void* weight, int64_t stride, int64_t n, int64_t k, void* out, int dtype, int num_threads);

// gate, up: [inner, k]
void er_pack_gate_up(const void* gate, const void* up, int64_t stride, int64_t inner, int64_t k, void* out, int dtype,
                     int num_threads);

// out: [k], of `dtype`, or float if `as_float`.
void er_unpack_row(const void* packed, int64_t row, int64_t k, void* out, int dtype, int as_float);

// The number of bytes of a packed weight of n outputs; of gate and up 2 * inner, where inner is rounded up to NUM_LANES.
int64_t er_grouped_size(const CGrouping* grouping, int64_t n, int64_t k);

// Whether such weights are multiplied as integers, exactly, with rows that are rounded to integers of 16 bits.
int er_uses_integers(const CGrouping* grouping);

// codes: [n, k] bytes, one code each; scales, offsets: [n, k / size]; the rows are contiguous. If `inner` is above 0,
// these are the rows of gate [inner] and then of up, which are packed as by `er_pack_gate_up`.
void er_pack_grouped(const CGrouping* grouping, const void* codes, const void* scales, const void* offsets, int64_t n,
                     int64_t k, int64_t inner, void* out, int num_threads);

// weight: [n, k] of `dtype`; codes: [n, k]; scales, offsets: [n, k / size] of float16. Codes of 4 bits are -8, ..., 7,
// from 0 on, without offsets. Their groups have scales of about the least squared error, those of a block of at most 256
// inputs multiples of one number, see CGrouping. Codes of 8 bits are -127.5, ..., 127.5, with a sign, in groups of a block
// of at most 128 inputs.
void er_quantize(const void* weight, int64_t n, int64_t k, int bits, int64_t size, int64_t block, void* codes,
                 void* scales, void* offsets, int dtype, int num_threads);

void er_multiply(const CProduct* products, int64_t count, int dtype, int num_threads);

// ---- hidden states

// out [num_rows, size] = x / sqrt(mean(x^2) + eps) * weight
void er_normalize(const float* x, int64_t stride, int64_t num_rows, int64_t size, const float* weight, float eps,
                  void* out, int64_t out_stride, int dtype, int num_threads);

// values: the rows of the tokens first, first + 1, ..., packed as a weight if `is_packed`, or by `er_pack_grouped` if
// there is a grouping; out: [num_rows, size], zeros for the tokens that the table does not have.
void er_embed(const void* values, int is_packed, const CGrouping* grouping, int64_t size, int64_t first, int64_t num_own,
              const int32_t* token_ids, int64_t num_rows, float* out, int dtype, int num_threads);

// out += x
void er_add(const float* x, int64_t stride, int64_t num_rows, int64_t size, float* out, int64_t out_stride,
            int num_threads);

// ---- attention

// The numbers in a cache of keys and values, see cache_format.h.
enum {
  CACHE_PLAIN,  // of the dtype that the kernel is called with
  CACHE_INT8,   // codes of 8 bits; a token has a scale for each head's key and value
  CACHE_FP8,
};

typedef struct {
  int64_t num_heads;     // a multiple of num_kv_heads
  int64_t num_kv_heads;
  int64_t head_dim;      // even, at most MAX_HEAD_DIM
  int64_t block_size;    // tokens
  int64_t window;        // 0: all positions; else a query at position p sees the positions > p - window
  float scale;           // of the scores; positive
  const float* sinks;    // [num_heads] a score without a key, beside those of the keys; null: none
  int64_t cache_format;  // one of CACHE_*
} CAttentionParams;

// The batch of one step, as attention needs it; the same for all layers.
typedef struct {
  int64_t num_rows;
  int64_t num_tokens;
  const int32_t* query_start_loc;  // [num_rows + 1] first token of each row in the batch
  const int32_t* seq_lens;         // [num_rows] tokens of the row in the cache; this step's are the last of them
  const int32_t* block_table;      // [num_rows, table_stride] blocks of each row in order of position
  int64_t table_stride;
  const int32_t* positions;        // [num_tokens]
  const int32_t* slot_mapping;     // [num_tokens] block * block_size + offset; no slot twice
} CAttentionMetadata;

// The number of elements of one block in the cache of a layer: of bytes, unless its format is CACHE_PLAIN.
int64_t er_block_elements(const CAttentionParams* params);

// Bytes of scratch that attention over contexts of up to `max_context` tokens needs. The scratch begins as zeros.
int64_t er_attention_scratch_size(const CAttentionParams* params, int64_t max_context, int num_threads);

// See `prepare` in attention.h.
void er_prepare(const CAttentionParams* params, const CAttentionMetadata* metadata, const float* qkv,
                const float* q_norm, const float* k_norm, float eps, const float* cos, const float* sin, void* queries,
                void* cache, int dtype, int num_threads);

// See `attend` in attention.h.
void er_attend(const CAttentionParams* params, const CAttentionMetadata* metadata, const void* queries,
               const void* cache, void* out, float* scratch, int dtype, int num_threads);

// ---- multi-head latent attention

typedef struct {
  int64_t num_heads;
  int64_t rank;          // features of a latent; this and the following sizes are even
  int64_t plain_dim;     // features of a head's query and key that are not rotated
  int64_t rotated_dim;   // features of a head's query and key that are rotated; they follow the plain ones
  int64_t value_dim;     // features of a head's value
  int64_t block_size;    // tokens
  float scale;           // of the scores; positive
  const float* norm;     // [rank] weight of the latents' RMS norm
  float eps;
  const void* keys;      // T, for each head [rank, plain_dim], packed by `er_pack`: maps a query to what it is to be
                         // multiplied with the latents
  const void* values;    // T, for each head [value_dim, rank], packed: maps a latent to the head's value
} CMLAParams;

// Working memory of latent attention.
typedef struct {
  float* splits;         // see `er_mla_scratch_size`
  void* latents;         // T [max_tokens, num_heads, rank]
  int64_t max_tokens;    // a larger batch is computed in parts; the numbers are the same
} CMLAScratch;

// Bytes of `CMLAScratch.splits` for contexts of up to `max_context` tokens. The memory begins as zeros.
int64_t er_mla_scratch_size(const CMLAParams* params, int64_t max_context, int num_threads);

// See `attend_mla` in mla.h.
void er_attend_mla(const CMLAParams* params, const CAttentionMetadata* metadata, const float* queries,
                   const float* latents, const float* cos, const float* sin, void* prepared, void* cache, void* out,
                   const CMLAScratch* scratch, int dtype, int num_threads);

// ---- mixture of experts

enum { SCORING_SOFTMAX, SCORING_SIGMOID };

enum { GROUP_SCORE_MAX, GROUP_SCORE_TOP2 };

// The parameters by which a router chooses and weights experts.
typedef struct {
  int64_t num_experts;
  int64_t top_k;
  int64_t scoring;               // turns scores into probabilities: one of SCORING_*
  const float* correction_bias;  // [num_experts] added to the probabilities for the choice alone; null: none
  int64_t num_groups;            // consecutive experts form a group; all groups have one size
  int64_t top_groups;            // only experts of this many best groups are candidates; together at least top_k
  int64_t group_score;           // rates a group by its best expert, or by the sum of its two best: GROUP_SCORE_*
  int64_t renormalize;           // divide the weights of a token's experts by their sum
  float renormalize_eps;         // added to that sum
  float scale;                   // of the weights, after renormalization
  int64_t round_weights;         // finally round to the model's dtype
} CRouterParams;

// The experts in the slots of a rank.
typedef struct {
  int64_t num_slots;
  int64_t hidden;                    // features of a token
  int64_t inner;                     // features of an expert, or of this rank's shard of it
  const void* const* gate_up;        // by slot, T packed by `er_pack_gate_up`
  const void* const* down;           // by slot, T packed by `er_pack`
  const CGrouping* gate_up_grouping;  // of weights that `er_pack_grouped` packed; null: T
  const CGrouping* down_grouping;
  const float* const* gate_up_bias;  // by slot, [2 * inner]; null: no expert has one
  const float* const* down_bias;     // by slot, [hidden]; null: no expert has one
  int64_t epilogue;                    // of gate and up
  CClampedSwiglu swiglu;
} CExperts;

// The expert slots of each expert. Token i of a batch uses copy i % num_copies[e] of expert e.
typedef struct {
  const int32_t* table;       // [num_experts, max_copies] slots, -1: on another rank; null: expert e is in slot e
  const int32_t* num_copies;  // [num_experts]
  int64_t max_copies;
} CExpertSlotMap;

// Memory to which the ids of each token's experts are written as well.
typedef struct {
  void* ids;        // [num_tokens, top_k] uint16 if `is_wide`, else uint8; null: not recorded
  int64_t stride;
  int64_t is_wide;
} CExpertTrace;

// The tokens whose experts are chosen by scores.
typedef struct {
  const float* scores;    // [num_tokens, num_experts], the router's
  int64_t scores_stride;
  float* hidden;          // [num_tokens, hidden], to which the result is added
  int64_t hidden_stride;
  int32_t* ids;           // [num_tokens, top_k] memory for the chosen experts
  CExpertTrace trace;
} CRoutedTokens;

// See `route` in routing.h. `dtype`: rounds the weights, if they are rounded.
void er_route(const CRouterParams* router, const float* scores, int64_t stride, int64_t num_tokens, int32_t* ids,
              float* weights, int dtype, int num_threads);

// Bytes of scratch that `max_tokens` tokens at a time need.
int64_t er_experts_scratch_size(const CExperts* experts, int64_t top_k, int64_t max_tokens, int dtype);

// The functions below take scratch for `max_tokens`, where a multiple of 64 begins. A larger batch is computed in
// parts, each of which reads the weights again; the numbers are the same.

// x: T [num_tokens, hidden]; counts: [num_experts], to which the number of tokens of each expert is added, or null.
void er_compute_experts(const CRouterParams* router, const CExperts* experts, const CExpertSlotMap* slot_map,
                        const void* x, int64_t x_stride, int64_t num_tokens, const CRoutedTokens* routed,
                        int64_t* counts, void* scratch, int64_t max_tokens, int dtype, int num_threads);

// slots: [num_tokens, top_k]; outputs: [num_tokens, top_k, hidden]
void er_compute_pairs(const CExperts* experts, const void* x, int64_t x_stride, int64_t num_tokens,
                      const int32_t* slots, int64_t top_k, float* outputs, void* scratch, int64_t max_tokens,
                      int dtype, int num_threads);

// slots, weights: [num_tokens, top_k]; hidden: [num_tokens, hidden], to which the sums are added.
void er_sum_pairs(const CExperts* experts, const void* x, int64_t x_stride, int64_t num_tokens, const int32_t* slots,
                  int64_t top_k, const float* weights, float* hidden, void* scratch, int64_t max_tokens, int dtype,
                  int num_threads);

// See `group_pairs` in experts.h.
void er_group_pairs(const int32_t* slots, int64_t num_tokens, int64_t top_k, int64_t num_slots, int32_t* offsets,
                    int32_t* tokens, int32_t* positions);

// See `combine` in experts.h.
void er_combine(const float* outputs, const int32_t* positions, const float* weights, int64_t num_tokens,
                int64_t top_k, int64_t size, float* hidden, int64_t stride, int num_threads);

// ---- ranking of logits

// Bytes of scratch for the functions below.
int64_t er_ranking_scratch_size(int64_t num_rows, int64_t size);

// ids, values: [num_rows]
void er_argmax(const float* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t* ids, float* values,
               void* scratch, int num_threads);

// rows: [num_masks], ascending; masks: [num_masks, ceil(size / 32)], one bit for each logit. The logits of row rows[i]
// whose bit is 0 become -inf. ids, values: [num_rows], the highest logits that are left; unmasked: [num_rows], the
// highest before.
void er_argmax_allowed(float* logits, int64_t stride, int64_t num_rows, int64_t size, const int64_t* rows,
                       int64_t num_masks, const int32_t* masks, int64_t* ids, float* values, float* unmasked,
                       void* scratch, int num_threads);

// ids, values: [num_rows, k], k at most MAX_TOP_K
void er_top_k(const float* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t k, int32_t* ids,
              float* values, void* scratch, int num_threads);

// ---- random draws

// Random draws of tokens, one from each of some rows of logits.
typedef struct {
  int64_t count;
  const int64_t* rows;           // [count] of the logits, no row twice
  const float* temperature;      // [count] above 0
  const double* uniforms;        // [count] numbers of (0, 1) that decide
  const int64_t* least_weights;  // [count] tokens of a lower weight are never drawn; at most the highest one
  const int64_t* top_k;          // [count] above 0: tokens of which one is drawn, the size of a row or more for all
  const double* top_p;           // [count] of (0, 1]: part of their weight that those must have of which one is drawn
} CDraws;

enum { DRAW_ONE_BITS = 40 };  // the highest weight is 2^DRAW_ONE_BITS

// Bytes of scratch for `er_draw`.
int64_t er_draw_scratch_size(int64_t count, int64_t size);

// highest: [rows of logits], finite for the rows of `draws`; ids: [rows of logits], those of `draws` are written.
void er_draw(const float* logits, int64_t stride, int64_t size, const float* highest, const CDraws* draws,
             int64_t* ids, void* scratch, int num_threads);

// ---- adapters

// The low-rank adapters of a product: y[layer] += scale * B (A x) for the tokens whose adapter is in a slot. The
// product concatenates the outputs of layers, each with factors of its own.
typedef struct {
  int64_t num_layers;
  int64_t max_rank;
  int64_t k;             // inputs
  int64_t a_stride;      // of a row; zeros follow the k inputs
  int64_t b_stride;      // from a slot to the next
  const void* a;         // T [num_slots, num_layers, max_rank * a_stride]: rows in blocks of 8, at the end of 4, 2 and
                         // 1, each [a_stride / 16 / PAIR, rows, 16 * PAIR]
  const void* b;         // T [num_slots, b_stride]: for each layer [outputs / 16, rank / PAIR, 16, PAIR], where the
                         // outputs and the rank end with zeros; with room for max_rank
  const int32_t* ranks;  // [num_slots, num_layers]; 0: no adapter
  const float* scales;   // [num_slots, num_layers]
  const int64_t* sizes;  // [num_layers] outputs of each layer
} CAdapterSite;

// ---- programs: the operations of a recorded forward pass

// Each operation has a struct with its arguments, in which int64_t x, out, ... are numbers of buffers.
enum {
  OP_EMBED,
  OP_NORMALIZE,
  OP_MULTIPLY,
  OP_ATTEND,
  OP_ATTEND_MLA,
  OP_COMPUTE_EXPERTS,
  OP_ADD,
  OP_CLEAR,
  OP_ROUND,
};

typedef struct {
  int64_t out;         // float
  const void* values;
  int64_t is_packed;
  const CGrouping* grouping;  // of values that `er_pack_grouped` packed; null: T
  int64_t size;
  int64_t first;
  int64_t num_own;
} CEmbed;

typedef struct {
  int64_t x;            // float
  int64_t out;          // T
  int64_t size;
  const float* weight;
  float eps;
} CNormalize;

typedef struct {
  int64_t x;              // T
  int64_t out;            // as the epilogue says
  int64_t n;
  int64_t k;
  int64_t epilogue;
  CClampedSwiglu swiglu;
  const void* weight;
  const float* bias;
  const CGrouping* grouping;     // of a weight that `er_pack_grouped` packed; null: T
  const CAdapterSite* adapters;  // null: the product has none
} CMultiply;

typedef struct {
  int64_t qkv;              // float
  int64_t queries;          // T, memory for the prepared queries
  int64_t out;              // T
  CAttentionParams params;
  const float* q_norm;
  const float* k_norm;
  float eps;
  void* cache;
} CAttend;

typedef struct {
  int64_t queries;          // float
  int64_t latents;          // float
  int64_t prepared;         // T, memory for the prepared queries
  int64_t out;              // T
  CMLAParams params;
  void* cache;
} CAttendMLA;

typedef struct {
  int64_t x;                // T
  int64_t scores;           // float
  int64_t hidden;           // float
  CRouterParams router;
  CExperts experts;
  CExpertSlotMap slot_map;
  int64_t* counts;
  CExpertTrace trace;
} CComputeExperts;

// The arguments of OP_ADD, OP_CLEAR and OP_ROUND.
typedef struct {
  int64_t x;     // float
  int64_t out;   // float; of OP_ROUND T
  int64_t size;
} CElementwise;

typedef struct {
  int64_t operation;  // one of OP_*
  const void* args;   // its struct
} COp;

typedef struct {
  void* memory;
  int64_t stride;
} CBuffer;

// Everything that depends on the batch of a step.
typedef struct {
  CAttentionMetadata metadata;
  const int32_t* token_ids;
  const float* cos;          // [positions, rotated features / 2]
  const float* sin;
  void* attention_scratch;
  CMLAScratch mla_scratch;
  void* expert_scratch;
  int64_t expert_tokens;     // the `max_tokens` of expert_scratch
  int32_t* expert_ids;       // [num_tokens, top_k] memory for the ids that a layer chooses
  int64_t num_adapter_groups;      // 0: no token has an adapter
  const int32_t* adapter_slots;    // [num_adapter_groups]
  const int32_t* adapter_offsets;  // [num_adapter_groups + 1] first entry of each group in adapter_tokens, and their
                                   // number
  const int32_t* adapter_tokens;   // tokens, group by group
  float* adapter_scratch;          // see `adapter_scratch_size` in adapters.h
} CBatch;

// Run the operations in order, by one team of threads.
void er_run(int dtype, const COp* ops, int64_t count, const CBuffer* buffers, const CBatch* batch, int num_threads);

// Bytes of scratch that a product with adapters needs for `num_tokens` tokens.
int64_t er_adapter_scratch_size(const CMultiply* args, int64_t num_tokens);

// ---- decode steps: the pass of one token of each row, and the choice of the token behind it

// The running requests by row.
typedef struct {
  int32_t* token_ids;          // [*, token_stride]
  int64_t token_stride;
  const int32_t* block_table;  // [*, table_stride] blocks of each row in order of position
  int64_t table_stride;
  int64_t block_size;          // tokens
  int64_t* num_tokens;         // [*] known tokens
  int64_t* num_computed;       // [*] the first tokens that are in the cache
  const int64_t* features;     // [*] flags of what a row's choice takes; 0: the token of the highest logit
  int64_t random;              // the flag of a draw, for which the following parameters are
  const int64_t* streams;      // [*] unsigned initial states of random numbers
  const float* temperature;    // [*] above 0
  const double* min_p;         // [*]
  const int64_t* top_k;        // [*] the size of the vocabulary, or fewer tokens
  const double* top_p;         // [*] 1, or less
} CDecodeTable;

typedef struct {
  int64_t dtype;
  const COp* ops;           // the whole pass
  int64_t num_ops;
  const CBuffer* buffers;
  CBatch* batch;            // what depends on the rows is overwritten
  int64_t max_context;      // positions that `batch` has memory for
  int64_t hidden;           // number of the buffer with the hidden states that the pass ends with
  CProduct head;            // maps them to logits. x, num_rows and y are overwritten
  int64_t pass_threads;
  int64_t head_threads;
  int64_t ranking_threads;
  int64_t draw_threads;
  CDecodeTable table;
} CDecode;

// Compute the last token of each of `rows` [num_rows], none of them twice, and choose the next one: that of the highest
// logit, or a draw. It becomes the row's last known token.
//
// logits: [num_rows, n of the head] memory for them; next: [num_rows] the chosen tokens, -1 for a row whose highest logit
// is not finite, which gets token 0. Returns 0, and changes nothing, if a row computes another token or chooses in another
// way, or if there is too little memory for its context; else 1.
int er_decode(const CDecode* step, const int64_t* rows, int64_t num_rows, float* logits, int64_t* next);

// The hash of this file, as of the time when the library was compiled.
const char* er_abi_fingerprint(void);

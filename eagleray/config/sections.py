"""Sections of the configuration. Each field is a flag of the CLI and a keyword argument of `LLM`, by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from eagleray.config.observability import ObservabilityConfig
from eagleray.config.serving import Positive, Seconds, ServingConfig

Rank = Annotated[int, Meta(ge=0)]

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model and how it is loaded."""

    model: Annotated[
        str | None,
        Meta(
            description="Checkpoint in Hugging Face format: a directory, an id such as Qwen/Qwen3-0.6B, or a URL such "
            "as s3://bucket/model. Without it: the embedded demo model."
        ),
    ] = None
    tokenizer: Annotated[
        str | None, Meta(description="Directory, id or URL of the tokenizer, if it is not the model's.")
    ] = None
    revision: Annotated[
        str | None,
        Meta(description="Branch, tag or commit of a model id. Default: main. Directories have no revisions."),
    ] = None
    tokenizer_revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of the tokenizer's id. Default: the model's, or main.")
    ] = None
    hf_token: Annotated[
        str | None,
        Meta(
            description="Token for downloads of private and gated models; better given as the environment variable "
            "HF_TOKEN. Default: HF_TOKEN, or that of `hf auth login`."
        ),
    ] = None
    download_dir: Annotated[
        str | None,
        Meta(
            description="Cache for downloaded models, in the layout of Hugging Face. Default: HF_HUB_CACHE, else "
            "HF_HOME/hub, else ~/.cache/huggingface/hub."
        ),
    ] = None
    ignore_patterns: Annotated[
        list[str], Meta(description="Patterns of files of a repository that are not downloaded, such as 'original/*'.")
    ] = []
    hf_config_path: Annotated[
        str | None, Meta(description="Directory or id that config.json is read from, if it is not the model's.")
    ] = None
    hf_overrides: Annotated[
        dict[str, Any],
        Meta(
            description="Fields that replace those of config.json, as JSON. Objects are merged, null removes a field."
        ),
    ] = {}
    skip_tokenizer_init: Annotated[bool, Meta(description="Load no tokenizer: token ids in, token ids out.")] = False
    served_model_name: Annotated[
        list[str], Meta(description="Names that requests may use for the model; the first one is shown in answers.")
    ] = []
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "half", "float"],
        Meta(description="Number format of weights and computation; auto takes the checkpoint's."),
    ] = "auto"
    quantization: Annotated[
        Literal["fp8", "int8", "int4", "gptq", "awq", "compressed-tensors"] | None,
        Meta(
            description="Quantize the weights of linear layers and experts when they are loaded. fp8: with a scale for "
            "each block of 128 x 128. int8, int4 (on CPUs): with a scale for 32 numbers of a row, and the head in "
            "int8. Default: the format of the checkpoint, which fp8, gptq, awq and compressed-tensors name, too."
        ),
    ] = None
    max_model_len: Annotated[
        Positive | Literal["auto"] | None,
        Meta(
            description="Longest sequence, prompt and output together, in tokens. auto: the model's own, or what fits "
            "into the cache if that is less. Default: the model's own."
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Meta(description="dummy: random weights, no weight files needed."),
    ] = "auto"
    generation_config: Annotated[
        str,
        Meta(
            description="Source of default sampling parameters. auto: the model's generation_config.json. none: "
            "nothing. Else a directory with a generation_config.json."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any],
        Meta(
            description='Fields that replace those of generation_config.json, as JSON: {"temperature": 0.7}; also if '
            "`generation_config` is none."
        ),
    ] = {}
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Meta(
            description="generate: continue prompts. pooling: return one vector for each prompt, an embedding or the "
            "scores of a classifier. auto: pooling if the checkpoint's architecture or its modules.json asks for it."
        ),
    ] = "auto"
    convert: Annotated[
        Literal["auto", "none", "embed", "classify"],
        Meta(
            description="Vector of a pooling model. embed: the hidden state behind the last norm. classify: the output "
            "of the checkpoint's `score` head. auto: classify if the checkpoint has that head, else embed."
        ),
    ] = "auto"
    pooler_config: Annotated[
        dict[str, Any],
        Meta(
            description="How a pooling model pools, as JSON: `pooling_type` (LAST, MEAN or CLS) and `use_activation`. "
            "Default: as modules.json says, else the last token, with normalized embeddings."
        ),
    ] = {}
    chat_template: Annotated[
        str | None, Meta(description="File with a Jinja chat template to use in place of the model's.")
    ] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(
            description="Form in which the chat template gets the contents of messages: string, as texts; openai, as "
            "lists of parts; auto, as the template uses them."
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        str,
        Meta(
            description="Format of the model's tool calls, by the name of its parser in vLLM, such as hermes. auto: "
            "the format that the chat template shows. none: tool calls are refused. See docs/tools.md."
        ),
    ] = "auto"
    tool_parser_plugin: Annotated[
        str | None,
        Meta(
            description="Python file that registers further formats of tool calls for `tool_call_parser`. It runs in "
            "every API server. See docs/tools.md."
        ),
    ] = None
    tool_strict_level: Annotated[
        Literal["auto", "function", "parameter"],
        Meta(
            description="Constraint of tool calls that the model is free to make. auto: arguments of tools with "
            "`strict` follow their schemas. function: calls name a tool of the request, with a JSON object. parameter: "
            "all arguments follow their schemas."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            description="Format in which the model writes its reasoning, by the name of its parser in vLLM, such as "
            "qwen3. auto: the format that the chat template shows. none: reasoning is a part of the answer. See "
            "docs/tools.md."
        ),
    ] = "auto"
    reasoning_parser_plugin: Annotated[
        str | None,
        Meta(
            description="Python file that registers further formats of reasoning for `reasoning_parser`. It runs in "
            "every API server. See docs/tools.md."
        ),
    ] = None
    reasoning_config: Annotated[
        dict[str, Any],
        Meta(
            description="End of reasoning whose `thinking_token_budget` is used, as JSON: `reasoning_end_str`, a text "
            "that ends with the end marker of the format. Default: the end marker."
        ),
    ] = {}
    structured_outputs_backend: Annotated[
        Literal["auto", "llguidance", "xgrammar"],
        Meta(
            description="Library that compiles the grammars of structured outputs. auto: llguidance, and xgrammar, if "
            "it is installed, for what llguidance refuses."
        ),
    ] = "auto"
    structured_outputs_whitespace: Annotated[
        str,
        Meta(
            description="Regular expression of the white space between elements of JSON that follows a schema; empty: "
            "none. Requests may bring their own (`whitespace_pattern`)."
        ),
    ] = r"[ \n\t]{0,16}"
    structured_outputs_disable_additional_properties: Annotated[
        bool,
        Meta(description="Let objects have only the properties that a schema names, unless it allows others."),
    ] = False
    deterministic: Annotated[
        bool,
        Meta(
            description="Promise that a request gets the same tokens alone, in any batch and after an interruption; "
            "refuse to start where the kernels cannot keep that."
        ),
    ] = False
    enable_return_routed_experts: Annotated[
        bool,
        Meta(description="Let requests ask which experts computed each token (models with experts only)."),
    ] = False
    max_logprobs: Annotated[
        int, Meta(ge=-1, description="Most log-probabilities a request may ask for; -1: no limit.")
    ] = 20
    logprobs_mode: Annotated[
        LogprobsMode,
        Meta(
            description="Kind of log-probabilities that requests get. raw_logprobs, raw_logits: those of the model. "
            "processed_logprobs, processed_logits: after bias, forbidden tokens, penalties, temperature, min_p, top_k "
            "and top_p; dropped tokens are minus infinity (-9999 in JSON). Prompt log-probabilities are always raw."
        ),
    ] = "raw_logprobs"
    seed: Annotated[
        int | None,
        Meta(description="Seeds the requests that bring none (and dummy weights), so that a run can be repeated."),
    ] = None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens of one cache block.")] = 16
    num_kv_blocks: Annotated[
        Positive | None, Meta(description="Number of cache blocks. Default: as many as the memory allows.")
    ] = None
    kv_cache_memory: Annotated[
        str | int | None, Meta(description="Memory for the cache, in bytes or as in 4GiB. Default: sized from memory.")
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        Meta(
            description="Number format of keys and values in the cache. auto: the model's. int8, fp8: 8 bits, in about "
            "half the memory: on CPUs with a scale for each token and head, and int8 is more exact and faster; on GPUs "
            "of compute capability 8.9 or more fp8 alone, without scales."
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Part of a GPU's memory that the engine may use.")
    ] = 0.9
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the cache of equal prompt beginnings.")] = True


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters (LoRA) that are served beside the model."""

    enable_lora: Annotated[
        bool, Meta(description="Serve adapters in PEFT's format, which requests choose by name.")
    ] = False
    max_loras: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Most adapters that are loaded at the same time; all of them may run in one step. Memory is "
            "allocated for twice this number, because running requests keep an adapter that is replaced.",
        ),
    ] = 8
    max_lora_rank: Annotated[int, Meta(ge=1, le=512, description="Highest rank of an adapter.")] = 16
    lora_modules: Annotated[
        list[str], Meta(description="Adapters that are loaded at the start, each as NAME=DIRECTORY.")
    ] = []

    @property
    def num_slots(self) -> int:
        """Number of slots for adapters that the workers have."""
        return 2 * self.max_loras if self.enable_lora else 0


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scheduling of requests and steps."""

    max_num_seqs: Annotated[int, Meta(ge=1, description="Most requests that run at the same time.")] = 256
    max_num_batched_tokens: Annotated[
        Positive | None,
        Meta(
            description="Most tokens computed in one step; longer prompts go in chunks. Default: 512 on a CPU, "
            "8192 on a GPU."
        ),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Meta(description="fcfs: first come, first served. priority: lower `priority` of a request first."),
    ] = "fcfs"
    speculative_config: Annotated[
        dict[str, Any],
        Meta(
            description='Drafts of tokens that a step checks together, as JSON: {"method": "ngram", '
            '"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}, or {"method": "suffix"} '
            'to find them in the outputs of all requests, or {"method": "draft_model", "model": NAME, '
            '"num_speculative_tokens": 3} to have a smaller model propose them, or {"method": "mtp", '
            '"num_speculative_tokens": 1} for the layer of DeepSeek-V3. Tokens and log-probabilities are the '
            "same with and without. See docs/speculation.md."
        ),
    ] = {}


class ExecutionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Device, executor and numerics of the workers."""

    executor: Annotated[
        Literal["auto", "in-process", "processes", "ray", "ray-graph"],
        Meta(
            description="What a worker is: an object of the engine, a process, or a Ray actor that is reached by the "
            "same queue (ray) or by a compiled graph (ray-graph). auto: ray inside a placement group, in-process for "
            "one worker, else processes."
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="auto: a GPU if torch sees one, else the CPU.")
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "triton", "fa3", "torch"],
        Meta(
            description="Kernels for attention on a GPU. triton: our own. fa3: FlashAttention-3 for prompts, if it is "
            "installed, beside our own. auto: fa3 where it supports the model, else triton, else torch. torch: plain "
            "torch for the whole model, on CPUs too, which is slower."
        ),
    ] = "auto"
    num_threads: Annotated[
        Positive | None, Meta(description="Threads of a CPU worker. Default: the cores this process may use.")
    ] = None
    worker_multiprocessing_method: Annotated[
        Literal["forkserver", "spawn"],
        Meta(
            description="How engines and workers that are processes of this host are started after the first start, on "
            "CPUs. forkserver: as forks of a process that has imported torch, which takes 0.2 GiB. spawn: fresh, each "
            "with imports of its own, as in the first start and on GPUs."
        ),
    ] = "forkserver"
    async_scheduling: Annotated[
        bool | None,
        Meta(description="Plan and send the next step while the current one runs. Default: where it helps."),
    ] = None
    heartbeat_timeout: Annotated[
        float,
        Meta(ge=1, description="Seconds of silence after which a worker counts as lost, and ends by itself."),
    ] = 10.0
    worker_extension_cls: Annotated[
        str | None,
        Meta(
            description="`package.module.Class` or `package.module:Class` whose methods `collective_rpc` can call on "
            "every worker. Its constructor takes the worker; a class without such a constructor is used as a mixin."
        ),
    ] = None
    weight_transfer_config: Annotated[
        dict[str, Any],
        Meta(
            description="Defaults for the fields of `init_info` of a weight transfer, as JSON, such as `backend`: "
            "gloo, nccl, torch_nccl, shm, ipc or disk. Default backend: nccl on GPUs, else gloo."
        ),
    ] = {}
    weight_update: Annotated[
        Literal["staged", "in-place"],
        Meta(
            description="Place of new weights until their update is finished. staged: in memory of their own, while "
            "the old weights serve. in-place: over the old weights, without further memory; no request is computed "
            "during an update, and an update that fails leaves no usable weights."
        ),
    ] = "staged"
    instance_name: Annotated[
        str | None,
        Meta(
            description="Name of this deployment: up to 64 letters, digits, `.`, `_` and `-`. Its actors and placement "
            "groups on Ray are named by it, and no other deployment on the cluster may have it. Default: a random one."
        ),
    ] = None
    startup_timeout: Annotated[
        float, Meta(gt=0, description="Seconds an engine may take from its start until it can take requests.")
    ] = 600.0


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parallelism: the numbers of workers and engines."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1, description="Workers that share every layer, each with a part of its weights.")
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Meta(ge=1, description="Stages that the layers are divided into, one after another.")
    ] = 1
    data_parallel_size: Annotated[
        int, Meta(ge=1, description="Engines: copies of the model that share the requests, in the whole deployment.")
    ] = 1
    data_parallel_backend: Annotated[
        Literal["processes", "ray"],
        Meta(description="What an engine is: a process of this host, or a Ray actor on any node of the cluster."),
    ] = "processes"
    data_parallel_rank: Annotated[
        Rank | None,
        Meta(
            description="Run the engine of this rank alone, behind a load balancer of your own that knows the others.",
        ),
    ] = None
    data_parallel_start_rank: Annotated[
        Rank | None,
        Meta(description="Run `data_parallel_size_local` engines from this rank on; others run elsewhere."),
    ] = None
    data_parallel_size_local: Annotated[
        Positive | None, Meta(description="Engines of this deployment that run here. Default: all of them.")
    ] = None
    autoscale: Annotated[
        str | None,
        Meta(
            description="Keep the number of engines between MIN and MAX as the load needs, given as MIN:MAX, such as "
            "1:4. The start is with `data_parallel_size` engines, or MIN if that is more.",
        ),
    ] = None
    autoscale_target_queue: Annotated[
        float, Meta(gt=0, description="Waiting sequences per engine above which `autoscale` adds engines.")
    ] = 5.0
    autoscale_target_ttft: Annotated[
        Seconds | None,
        Meta(
            description="Seconds to the first token above which `autoscale` adds engines, if more than a tenth of the "
            "requests take longer. Default: the time is not looked at.",
        ),
    ] = None
    autoscale_down_delay: Annotated[
        float,
        Meta(ge=10, description="Seconds for which fewer engines must do before `autoscale` removes some."),
    ] = 300.0

    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="Divide the experts among all workers of all engines, whole ones to each, instead of a part of "
            "every expert to each worker of an engine."
        ),
    ] = False
    expert_dispatch: Annotated[
        Literal["auto", "all-reduce", "all-gather", "all-to-all"],
        Meta(
            description="How tokens and experts come together. all-reduce: every worker has all tokens already. "
            "all-gather: every worker gets all tokens. all-to-all: every token goes where its experts are. auto: "
            "all-reduce for one engine, else all-gather."
        ),
    ] = "auto"
    enable_eplb: Annotated[
        bool, Meta(description="Move experts among the workers so that all have about as many tokens.")
    ] = False
    num_redundant_experts: Annotated[
        int, Meta(ge=0, description="Additional places for copies of experts with many tokens, in all.")
    ] = 0
    eplb_step_interval: Annotated[
        int, Meta(ge=1, description="Steps after which experts are moved, if they are not balanced.")
    ] = 3000

    @property
    def world_size(self) -> int:
        """Number of workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class RayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers and engines as Ray actors."""

    ray_address: Annotated[
        str | None,
        Meta(
            description="Ray cluster to join: host:port, or auto for the one running here; local starts one. Default: "
            "the cluster that this program belongs to or that runs here, else a local one."
        ),
    ] = None
    placement_group: Annotated[
        str | None,
        Meta(
            description="Placement group to put the workers in, by its id in hex or its name. Default: the one that "
            "this program runs in, else one of the engine's own."
        ),
    ] = None
    bundle_indices: Annotated[
        list[int],
        Meta(description="Bundle of each worker, in order of rank. Default: the engine's node first, then by node."),
    ] = []
    ray_placement_strategy: Annotated[
        Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
        Meta(description="How the bundles of the engine's own placement group are spread over nodes."),
    ] = "PACK"
    ray_engine_placement: Annotated[
        Literal["pack", "spread", "strict-spread"],
        Meta(
            description="Nodes of several engines: pack fills one after the other, spread takes the one with fewest "
            "engines, strict-spread gives none of them two."
        ),
    ] = "pack"
    ray_nodes: Annotated[
        list[str],
        Meta(description="Nodes that engines and workers may use, by id, host name or address. Default: all."),
    ] = []
    ray_worker_resources: Annotated[
        dict[str, float],
        Meta(description='What one worker takes, as JSON: {"GPU": 0.5}. Default: a GPU, or on CPUs one CPU.'),
    ] = {}
    ray_placement_timeout: Annotated[
        float, Meta(gt=0, description="Seconds to wait for resources that the cluster has, or may get.")
    ] = 300.0
    ray_runtime_env: Annotated[
        dict[str, Any],
        Meta(description="runtime_env of the workers, as JSON, merged over that of the calling program."),
    ] = {}
    ray_env_exclude: Annotated[
        list[str], Meta(description="Environment variables (patterns) of the engine that workers do not get.")
    ] = []
    ray_env_include: Annotated[
        list[str],
        Meta(description="Environment variables (patterns) that workers get although they look like secrets."),
    ] = []
    ray_graph_timeout: Annotated[
        float, Meta(gt=0, description="Seconds that a step may take in the compiled graph of the executor ray-graph.")
    ] = 600.0


class RecoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reactions to processes that exit or hang."""

    max_request_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="How many engines a request may lose in a row, without a token between them, and still go on "
            "elsewhere; then it fails with the cause.",
        ),
    ] = 3
    max_engine_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="How often in a row an engine that ended by an exception of its own, without having worked for "
            "10 seconds, is started again before it is given up. What was killed or lost is started again for as long "
            "as it takes. 0: no engine and no API server is ever started again.",
        ),
    ] = 5
    watchdog_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that a step may take, and as much again for every 512 tokens of it, before its engine "
            "counts as hung and is replaced.",
        ),
    ] = 60.0
    weight_update_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds without a call of the trainer after which an open weight update is aborted; the old "
            "weights stay. Also the limit of each wait of a worker for the trainer.",
        ),
    ] = 300.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All options that the user set."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    lora: LoraConfig = LoraConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    execution: ExecutionConfig = ExecutionConfig()
    parallel: ParallelConfig = ParallelConfig()
    ray: RayConfig = RayConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    serving: ServingConfig = ServingConfig()

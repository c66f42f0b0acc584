"""The sections of the configuration. Each field is a flag of the CLI and a keyword argument of `LLM`, by its name."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["CacheConfig", "Config", "ExecutionConfig", "ModelConfig", "SchedulingConfig", "ServingConfig"]

Positive = Annotated[int, Meta(ge=1)]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model and how it is read."""

    model: Annotated[
        str | None,
        Meta(description="Directory with a checkpoint in Hugging Face format. Without it: the embedded demo model."),
    ] = None
    tokenizer: Annotated[str | None, Meta(description="Directory of the tokenizer, if it is not the model's.")] = None
    skip_tokenizer_init: Annotated[bool, Meta(description="Load no tokenizer: token ids in, token ids out.")] = False
    served_model_name: Annotated[
        list[str], Meta(description="Names that requests may use for the model; the first one is shown in answers.")
    ] = []
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "half", "float"],
        Meta(description="Number format of weights and computation; auto takes the checkpoint's."),
    ] = "auto"
    max_model_len: Annotated[
        Positive | None,
        Meta(description="Longest sequence, prompt and output together, in tokens. Default: the model's own."),
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Meta(description="dummy: random weights, no weight files needed."),
    ] = "auto"
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(description="auto: default sampling parameters come from the model's generation_config.json."),
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="File with a Jinja chat template to use in place of the model's.")
    ] = None
    max_logprobs: Annotated[int, Meta(ge=0, description="Most log-probabilities a request may ask for.")] = 20
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
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Part of a GPU's memory that the engine may use.")
    ] = 0.9
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the cache of equal prompt beginnings.")] = True


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What runs when."""

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


class ExecutionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the model runs."""

    executor: Annotated[Literal["in-process"], Meta(description="How the engine reaches its workers.")] = "in-process"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="auto: a GPU if torch sees one, else the CPU.")
    ] = "auto"
    num_threads: Annotated[
        Positive | None, Meta(description="Threads of a CPU worker. Default: the cores this process may use.")
    ] = None
    startup_timeout: Annotated[
        float, Meta(gt=0, description="Seconds an engine may take from its start until it can take requests.")
    ] = 600.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe message that is logged.")
    ] = "info"


class ServingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[list[str], Meta(description="Keys that clients must show one of; none: no key needed.")] = []
    max_request_bytes: Annotated[int, Meta(ge=1, description="Largest request body that is accepted, in bytes.")] = (
        32 * 2**20
    )
    shutdown_timeout: Annotated[
        float, Meta(ge=0, description="Seconds that running requests get to finish when the server is told to stop.")
    ] = 30.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the user asked for."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    execution: ExecutionConfig = ExecutionConfig()
    serving: ServingConfig = ServingConfig()

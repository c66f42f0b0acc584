"""The fate of every option of vLLM 0.32 that is not an option of eagleray by the same name.

Facts alone, applied by `vllm_options`. An option that eagleray gets is removed from here: its own name wins already.
"""

from __future__ import annotations

from typing import Any

from eagleray.config import option_values as values
from eagleray.config.fates import Expansion, Fate, NoEffect, Refused, Renamed


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SWITCHES = _names(
    """aggregate_engine_logging allow_deprecated_quantization cohere_is_reasoning_model cudagraph_metrics
    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb dcp_q_replicate
    disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs
    disable_frontend_multiprocessing disable_hybrid_kv_cache_manager disable_log_requests
    disable_nccl_for_dp_synchronization disable_sliding_window
    enable_auto_tool_choice enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator
    enable_dbo enable_elastic_ep enable_ep_weight_filter enable_fault_tolerance enable_flash_late_interaction
    enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing
    enable_log_deltas enable_logging_iteration_details
    enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
    enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras
    enable_nccl_comm_suspend enable_offline_docs enable_per_request_metrics enable_prompt_embeds
    enable_reasoning enable_request_id_headers enable_scale_out enable_server_load_tracking
    enable_shm_tensor_arena enable_sleep_mode
    enable_tower_connector_lora enable_trace_replay enforce_eager
    fail_on_environ_validation fully_sharded_loras grpc headless interleave_mm_strings jit_monitor_verbose
    kv_cache_metrics kv_sharing_fast_prefill language_model_only log_error_stack
    long_prefill_token_threshold_adaptive mm_device_do_normalize mm_encoder_only numa_bind
    ray_workers_use_nsight return_sampling_mask scheduler_reserve_full_isl
    skip_mm_profiling sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay tokens_only
    trust_remote_code trust_request_mm_kwargs use_fp64_gumbel use_replayssm use_tqdm_on_load
    use_v2_block_manager"""
)
"""Options that are true or false: their flags take no value."""

LISTS = _names(
    """allowed_media_domains collect_detailed_traces cpu_offload_params cudagraph_capture_sizes
    kv_cache_dtype_skip_layers logits_processors lora_target_modules numa_bind_cpus numa_bind_nodes
    offload_params sleep_preserve_parameter_names"""
)
"""Options whose flags take one value or more."""

SPELLINGS = {
    "-asc": "api_server_count",
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-n": "nnodes",
    "-r": "node_rank",
    "-q": "quantization",
    "-O": "optimization_level",
    "-sc": "speculative_config",
    "-dc": "diffusion_config",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "--device-memory-utilization": "gpu_memory_utilization",
    "--vllm-metric-names": "enable_vllm_metrics",
}
"""Further spellings of flags, and the option of each."""


NO_EFFECT = {
    "tools are on whenever the model's format of calls is known (`tool_call_parser`)": "enable_auto_tool_choice",
    "prompts are always computed in chunks": "enable_chunked_prefill max_num_partial_prefills",
    "`max_num_batched_tokens` limits a step": "max_num_scheduled_tokens",
    "every answer has the header X-Request-Id": "enable_request_id_headers",
    "/load always says how many requests there are": "enable_server_load_tracking",
    "an engine that exits is always replaced": "enable_fault_tolerance fault_tolerance_config",
    "every instance can sleep": (
        "enable_sleep_mode enable_cumem_allocator enable_nccl_comm_suspend sleep_mode_offload_cudagraph"
    ),
    "engines and servers find each other through their supervisor": (
        "data_parallel_address data_parallel_rpc_port master_addr master_port"
    ),
    "`data_parallel_rank` and `data_parallel_start_rank` say it already": (
        "data_parallel_external_lb data_parallel_hybrid_lb"
    ),
    "it belongs to `data_parallel_multi_port_external_lb`, which is not there": (
        "data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s"
        " dp_supervisor_probe_failure_threshold"
    ),
    "requests may always give their tokens (`trace_decode_token_ids`)": "enable_trace_replay",
    "an API server is always a process of its own": "disable_frontend_multiprocessing",
    "all processes log to standard error": "aggregate_engine_logging",
    "there are no pages with documentation": "disable_fastapi_docs enable_offline_docs",
    "no code of checkpoints is ever run": "trust_remote_code code_revision",
    "`reasoning_parser` decides whether reasoning is split off": "enable_reasoning",
    "the device and the model decide which kernels run": (
        "enforce_eager compilation_config optimization_level performance_mode cudagraph_capture_sizes"
        " max_cudagraph_capture_size cuda_graph_sizes max_seq_len_to_capture attention_config moe_backend"
        " linear_backend sparse_indexer_topk_backend kernel_config ir_op_priority enable_flashinfer_autotune"
        " disable_cascade_attn jit_monitor_mode jit_monitor_verbose enable_flash_late_interaction"
        " kv_sharing_fast_prefill swa_bounded_replay enable_hc_sp enable_batch_sharded_sampling"
    ),
    "tokens are always drawn with 64-bit numbers": "use_fp64_gumbel",
    "the positions of the ranks decide how they exchange tensors": (
        "disable_custom_all_reduce disable_nccl_for_dp_synchronization dp_sync_interval enable_shm_tensor_arena"
    ),
    "steps are not divided into smaller ones": (
        "enable_dbo dbo_decode_token_threshold dbo_prefill_token_threshold ubatch_size num_scheduler_steps"
        " multi_step_stream_outputs"
    ),
    "weights are always read from safetensors files by all cores": (
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size"
        " max_parallel_loading_workers pt_load_map_location enable_ep_weight_filter"
    ),
    "a bar is shown on a terminal alone": "use_tqdm_on_load",
    "the system decides where the workers' memory is": "numa_bind numa_bind_nodes numa_bind_cpus",
    "a request that is preempted is computed again": "swap_space preemption_mode",
    "all layers have caches of the same kind": "disable_hybrid_kv_cache_manager use_v2_block_manager",
    "`startup_timeout`, `heartbeat_timeout` and `watchdog_timeout` limit every wait": (
        "distributed_timeout_seconds cpu_distributed_timeout_seconds"
    ),
    "no supported model has layers with a state": (
        "mamba_backend mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds"
        " mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode"
        " enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm gdn_prefill_backend"
        " kda_prefill_backend kda_decode_backend mamba_config"
    ),
    "the cache is not divided by positions": (
        "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size"
    ),
    "a request is admitted when its next chunk fits, and preempted if memory runs out": (
        "scheduler_reserve_full_isl watermark prefill_schedule_interval scheduler_delay_factor"
    ),
    "whole blocks are reused, least recently used ones are dropped first": (
        "prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit"
    ),
    "the load of the experts decides where they are": "expert_placement_strategy",
    "each API server renders its own requests: raise `api_server_count`": "renderer_num_workers",
    "nothing is offloaded": (
        "offload_backend cpu_offload_params offload_params offload_num_in_group offload_prefetch_step"
        " kv_offloading_backend"
    ),
    "adapters are read from their files, and `max_loras` of them are kept": (
        "max_cpu_loras fully_sharded_loras specialize_active_lora max_lora_cls_labels lora_extra_vocab_size"
    ),
    "requests have no images, sound or video": (
        "language_model_only mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm"
        " mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype"
        " mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"
        " interleave_mm_strings skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc"
        " mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize disable_chunked_mm_input"
        " trust_request_mm_kwargs ec_manager_config allowed_local_media_path allowed_media_domains"
        " disable_mm_preprocessor_cache enable_mm_processor_stats"
    ),
    "no metric is hidden": "show_hidden_metrics_for_version",
    "it belongs to `kv_cache_metrics`, which is not there": "kv_cache_metrics_sample",
    "drafts are counted for each engine, not for each request": "per_request_spec_decode_metrics",
    "requests are logged only if `enable_log_requests` is given": "disable_log_requests",
    "outputs are logged whole, at their end": "enable_log_deltas",
    "there are no models of Cohere": "cohere_is_reasoning_model cohere_format",
    "variables that are not known are ignored": "fail_on_environ_validation",
    "/inference/v1/generate is always served": "enable_scale_out",
    "a step is always planned while another one runs": "disable_async_output_proc",
}
"""Options that change no answer, by the reason."""

REFUSED = {
    "not supported: Ray places engines on several nodes: use `data_parallel_backend` ray and `ray_address`": (
        "headless node_rank nnodes"
    ),
    "not supported: start a server for each engine, each with its `data_parallel_rank`": (
        "data_parallel_multi_port_external_lb"
    ),
    "not supported: set CUDA_VISIBLE_DEVICES, or with Ray `bundle_indices`": "device_ids",
    "not supported: `worker_extension_cls` adds methods to workers": "worker_cls",
    "not supported: `scheduling_policy` chooses among the schedulers": "scheduler_cls",
    "not supported: requests come by HTTP": "grpc grpc_port tool_server",
    "not supported: there are no plug-ins for inputs and outputs": "io_processor_plugin",
    "not supported: `logit_bias`, `allowed_token_ids` and `bad_words` steer tokens": "logits_processors",
    "not supported: there are no further platforms": "additional_config",
    'not supported: `ray_runtime_env` takes {"nsight": …}': "ray_workers_use_nsight",
    "not supported: `skip_tokenizer_init` serves token ids alone": "tokens_only",
    "not supported: `max_num_seqs` limits the requests that run": "max_num_active_seqs",
    "not supported: `max_model_len` limits the length of sequences": "disable_sliding_window",
    "not supported: at level 2 all weights are discarded": "sleep_preserve_parameter_names",
    "not supported yet": (
        "return_sampling_mask kv_transfer_config kv_events_config enable_elastic_ep elastic_ep_max_dp_size"
        " custom_histogram_buckets profiler_config log_error_stack sse_keep_alive_interval"
        " max_num_queued_tokens long_prefill_token_threshold long_prefill_token_threshold_adaptive"
        " fingerprint_value model_loader_extra_config"
    ),
    "not supported: spans (`otlp_traces_endpoint`) have the times of queue, prefill and decode": (
        "collect_detailed_traces"
    ),
    "not supported: no marks are put into texts": "watermark_config",
    "not supported: no supported model has such embeddings": "engram_config",
    "not supported: `model` names the checkpoint": "model_weights",
    "not supported: prompts are texts or token ids": "enable_prompt_embeds",
    "not supported: `architectures` of config.json names the model": "model_class_overrides",
    "not supported: all models are eagleray's own": "model_impl",
    "not supported: checkpoints are in Hugging Face format": "config_format",
    "not supported: tokenizer.json is read by `tokenizers`": "tokenizer_mode",
    "not supported: `hf_overrides` changes this and other fields of config.json": "rope_scaling rope_theta",
    "not supported: use `device`": "device_config",
    "not supported: use `runner` and `convert`": "task",
    "not supported: no supported model generates by diffusion": "diffusion_config",
    "not supported: requests have no images, sound or video": (
        "limit_mm_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs mm_encoder_only"
        " ec_transfer_config default_mm_loras enable_tower_connector_lora"
    ),
    "not supported: use `tensor_parallel_size`": "decode_context_parallel_size prefill_context_parallel_size",
    "not supported: weights and cache stay on their device; use more devices (`tensor_parallel_size`)": (
        "cpu_offload_gb offload_group_size kv_offloading_size"
    ),
    "not supported: all layers have the same `kv_cache_dtype`": "kv_cache_dtype_skip_layers",
    "not supported: `quantization` and `kv_cache_dtype` have the formats that are supported": (
        "quantization_config allow_deprecated_quantization"
    ),
    "not supported: adapters are computed in the model's `dtype`": "lora_dtype",
    "not supported: an adapter changes the modules of its file": "lora_target_modules",
    "not supported: adapters have a matrix of its own for each expert": (
        "enable_mixed_moe_lora_format enable_moe_shared_loras"
    ),
    "not supported: /metrics lists the metrics that there are": (
        "kv_cache_metrics cudagraph_metrics enable_mfu_metrics enable_logging_iteration_details"
        " enable_layerwise_nvtx_tracing enable_per_request_metrics"
    ),
}
"""Options that ask for something that is not there, by the sentence of the error."""

OFF: dict[str, tuple[Any, ...]] = {
    "nnodes": (1,),
    "worker_cls": ("auto",),
    "model_impl": ("auto", "vllm"),
    "config_format": ("auto", "hf"),
    "tokenizer_mode": ("auto", "hf"),
    "task": ("auto", "generate"),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "lora_dtype": ("auto",),
}
"""Values of refused options that mean "off", besides those of `is_off`."""

ALIASES: dict[str, Fate] = {
    "distributed_executor_backend": Renamed("executor", values.executor),
    "kv_cache_memory_bytes": Renamed("kv_cache_memory", values.integer),
    "num_gpu_blocks_override": Renamed("num_kv_blocks"),
    "max_num_queued_reqs": Renamed("max_queued_requests"),
    "uvicorn_log_level": Renamed("log_level", values.log_level),
    "h11_max_incomplete_event_size": Renamed("max_header_bytes"),
    "h11_max_header_count": Renamed("max_header_count"),
    "all2all_backend": Expansion(values.expert_dispatch, ("expert_dispatch",)),
    "guided_decoding_backend": Renamed("structured_outputs_backend", values.grammar_backend),
    "structured_outputs_config": Expansion(values.structured_outputs, values.STRUCTURED_OUTPUTS),
    "eplb_config": Expansion(values.eplb, ("num_redundant_experts", "eplb_step_interval")),
    "aux_output_config": Expansion(values.auxiliary_outputs, ("enable_return_routed_experts",)),
    "anthropic_disabled_thinking_effort": Expansion(values.only("auto"), ()),
    "fingerprint_mode": Expansion(values.only("full"), ()),
    "spec_method": Expansion(values.speculation, ("speculative_config",)),
    "spec_model": Expansion(values.speculation, ("speculative_config",)),
    "spec_tokens": Expansion(values.speculation, ("speculative_config",)),
    "logging_config": Expansion(values.logging, ("log_level", "log_format", "log_config_file")),
}

TABLE: dict[str, Fate] = {
    **{name: NoEffect(reason) for reason, names in NO_EFFECT.items() for name in names.split()},
    **{name: Refused(reason, OFF.get(name, ())) for reason, names in REFUSED.items() for name in names.split()},
    **ALIASES,
}

MEANINGS = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dp_size": "data_parallel_size",
    "ep": "enable_expert_parallel",
    "ep_size": "enable_expert_parallel",
    "num_gpus": "tensor_parallel_size",
    "gpus": "tensor_parallel_size",
    "num_replicas": "data_parallel_size",
    "replicas": "data_parallel_size",
    "num_workers": "api_server_count",
    "workers": "api_server_count",
    "model_path": "model",
    "model_id": "model",
    "model_name": "served_model_name",
    "tokenizer_path": "tokenizer",
    "context_length": "max_model_len",
    "context_len": "max_model_len",
    "ctx_size": "max_model_len",
    "max_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "max_total_tokens": "max_model_len",
    "max_context_len": "max_model_len",
    "mem_fraction_static": "gpu_memory_utilization",
    "gpu_memory_fraction": "gpu_memory_utilization",
    "max_running_requests": "max_num_seqs",
    "max_batch_size": "max_num_seqs",
    "batch_size": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "max_batch_prefill_tokens": "max_num_batched_tokens",
    "schedule_policy": "scheduling_policy",
    "disable_radix_cache": "enable_prefix_caching",
    "page_size": "block_size",
    "random_seed": "seed",
    "lora_paths": "lora_modules",
    "max_loras_per_batch": "max_loras",
    "threads": "num_threads",
    "verbose": "log_level",
    "debug": "log_level",
    "bind": "host",
    "address": "host",
    "listen": "host",
    "token": "api_key",
    "backend": "executor",
    "timeout": "request_timeout",
}
"""Options that names of other programs mean, for the suggestions of errors."""

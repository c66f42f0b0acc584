"""Keyword arguments of `LLM`, for type checkers and editors. Made by `make keywords`, never edited."""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class EngineKeywords(TypedDict, total=False):
    """Options of eagleray by name, without those of the HTTP server."""

    tokenizer: str | None
    revision: str | None
    tokenizer_revision: str | None
    hf_token: str | None
    download_dir: str | None
    ignore_patterns: list[str] | str | None
    hf_config_path: str | None
    hf_overrides: dict[str, Any] | str | None
    skip_tokenizer_init: bool | None
    served_model_name: list[str] | str | None
    dtype: Literal["auto", "bfloat16", "float16", "float32", "half", "float"] | str | None
    quantization: Literal["fp8", "int8", "int4", "gptq", "awq", "compressed-tensors"] | str | None
    max_model_len: int | str | None
    load_format: Literal["auto", "safetensors", "dummy"] | str | None
    generation_config: str | None
    override_generation_config: dict[str, Any] | str | None
    runner: Literal["auto", "generate", "pooling"] | str | None
    convert: Literal["auto", "none", "embed", "classify"] | str | None
    pooler_config: dict[str, Any] | str | None
    chat_template: str | None
    chat_template_content_format: Literal["auto", "string", "openai"] | str | None
    tool_call_parser: str | None
    tool_parser_plugin: str | None
    tool_strict_level: Literal["auto", "function", "parameter"] | str | None
    reasoning_parser: str | None
    reasoning_parser_plugin: str | None
    reasoning_config: dict[str, Any] | str | None
    structured_outputs_backend: Literal["auto", "llguidance", "xgrammar"] | str | None
    structured_outputs_whitespace: str | None
    structured_outputs_disable_additional_properties: bool | None
    deterministic: bool | None
    enable_return_routed_experts: bool | None
    max_logprobs: int | str | None
    logprobs_mode: Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"] | str | None
    seed: int | str | None
    block_size: int | str | None
    num_kv_blocks: int | str | None
    kv_cache_memory: str | int | None
    kv_cache_dtype: Literal["auto", "int8", "fp8"] | str | None
    gpu_memory_utilization: float | str | None
    enable_prefix_caching: bool | None
    enable_lora: bool | None
    max_loras: int | str | None
    max_lora_rank: int | str | None
    lora_modules: list[str] | str | None
    max_num_seqs: int | str | None
    max_num_batched_tokens: int | str | None
    scheduling_policy: Literal["fcfs", "priority"] | str | None
    speculative_config: dict[str, Any] | str | None
    executor: Literal["auto", "in-process", "processes", "ray", "ray-graph"] | str | None
    device: Literal["auto", "cpu", "cuda"] | str | None
    attention_backend: Literal["auto", "triton", "fa3", "torch"] | str | None
    num_threads: int | str | None
    worker_multiprocessing_method: Literal["forkserver", "spawn"] | str | None
    async_scheduling: bool | None
    heartbeat_timeout: float | str | None
    worker_extension_cls: str | None
    weight_transfer_config: dict[str, Any] | str | None
    weight_update: Literal["staged", "in-place"] | str | None
    instance_name: str | None
    startup_timeout: float | str | None
    tensor_parallel_size: int | str | None
    pipeline_parallel_size: int | str | None
    data_parallel_size: int | str | None
    data_parallel_backend: Literal["processes", "ray"] | str | None
    data_parallel_rank: int | str | None
    data_parallel_start_rank: int | str | None
    data_parallel_size_local: int | str | None
    autoscale: str | None
    autoscale_target_queue: float | str | None
    autoscale_target_ttft: float | str | None
    autoscale_down_delay: float | str | None
    enable_expert_parallel: bool | None
    expert_dispatch: Literal["auto", "all-reduce", "all-gather", "all-to-all"] | str | None
    enable_eplb: bool | None
    num_redundant_experts: int | str | None
    eplb_step_interval: int | str | None
    ray_address: str | None
    placement_group: Any
    bundle_indices: list[int] | str | None
    ray_placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | str | None
    ray_engine_placement: Literal["pack", "spread", "strict-spread"] | str | None
    ray_nodes: list[str] | str | None
    ray_worker_resources: dict[str, Any] | str | None
    ray_placement_timeout: float | str | None
    ray_runtime_env: dict[str, Any] | str | None
    ray_env_exclude: list[str] | str | None
    ray_env_include: list[str] | str | None
    ray_graph_timeout: float | str | None
    max_request_restarts: int | str | None
    max_engine_restarts: int | str | None
    watchdog_timeout: float | str | None
    weight_update_timeout: float | str | None
    log_level: Literal["debug", "info", "warning", "error"] | str | None
    log_format: Literal["text", "json", "none"] | str | None
    log_config_file: str | None
    enable_log_requests: bool | None
    enable_log_outputs: bool | None
    max_log_len: int | str | None
    disable_log_stats: bool | None
    enable_vllm_metrics: bool | None
    otlp_traces_endpoint: str | None


class LLMKeywords(EngineKeywords, total=False):
    """Options of eagleray, and those of vLLM that are known, see "Options" in docs/compatibility.md."""

    additional_config: Any
    aggregate_engine_logging: bool | None
    all2all_backend: Any
    allow_deprecated_quantization: bool | None
    allowed_local_media_path: Any
    allowed_media_domains: Any
    anthropic_disabled_thinking_effort: Any
    attention_config: Any
    aux_output_config: Any
    code_revision: Any
    cohere_format: Any
    cohere_is_reasoning_model: bool | None
    collect_detailed_traces: Any
    compilation_config: Any
    config_format: Any
    cp_kv_cache_interleave_size: Any
    cpu_distributed_timeout_seconds: Any
    cpu_offload_gb: Any
    cpu_offload_params: Any
    cuda_graph_sizes: Any
    cudagraph_capture_sizes: Any
    cudagraph_metrics: bool | None
    custom_histogram_buckets: Any
    data_parallel_address: Any
    data_parallel_external_lb: bool | None
    data_parallel_hybrid_lb: bool | None
    data_parallel_multi_port_external_lb: bool | None
    data_parallel_rpc_port: Any
    data_parallel_supervisor_port: Any
    dbo_decode_token_threshold: Any
    dbo_prefill_token_threshold: Any
    dcp_comm_backend: Any
    dcp_kv_cache_interleave_size: Any
    dcp_q_replicate: bool | None
    decode_context_parallel_size: Any
    default_mm_loras: Any
    device_config: Any
    device_ids: Any
    diffusion_config: Any
    disable_async_output_proc: Any
    disable_cascade_attn: bool | None
    disable_chunked_mm_input: bool | None
    disable_custom_all_reduce: bool | None
    disable_fastapi_docs: bool | None
    disable_frontend_multiprocessing: bool | None
    disable_hybrid_kv_cache_manager: bool | None
    disable_log_requests: bool | None
    disable_mm_preprocessor_cache: Any
    disable_nccl_for_dp_synchronization: bool | None
    disable_sliding_window: bool | None
    distributed_executor_backend: Any
    distributed_timeout_seconds: Any
    dp_supervisor_probe_failure_threshold: Any
    dp_supervisor_probe_interval_s: Any
    dp_supervisor_probe_timeout_s: Any
    dp_sync_interval: Any
    ec_manager_config: Any
    ec_transfer_config: Any
    elastic_ep_max_dp_size: Any
    enable_auto_tool_choice: bool | None
    enable_batch_sharded_sampling: bool | None
    enable_chunked_prefill: bool | None
    enable_cumem_allocator: bool | None
    enable_dbo: bool | None
    enable_elastic_ep: bool | None
    enable_ep_weight_filter: bool | None
    enable_fault_tolerance: bool | None
    enable_flash_late_interaction: bool | None
    enable_flashinfer_autotune: bool | None
    enable_hc_sp: bool | None
    enable_layerwise_nvtx_tracing: bool | None
    enable_log_deltas: bool | None
    enable_logging_iteration_details: bool | None
    enable_mamba_cache_stochastic_rounding: bool | None
    enable_mamba_shared_prefix_checkpoint: bool | None
    enable_mfu_metrics: bool | None
    enable_mixed_moe_lora_format: bool | None
    enable_mm_embeds: bool | None
    enable_mm_processor_stats: bool | None
    enable_moe_shared_loras: bool | None
    enable_nccl_comm_suspend: bool | None
    enable_offline_docs: bool | None
    enable_per_request_metrics: bool | None
    enable_prompt_embeds: bool | None
    enable_reasoning: bool | None
    enable_request_id_headers: bool | None
    enable_scale_out: bool | None
    enable_server_load_tracking: bool | None
    enable_shm_tensor_arena: bool | None
    enable_sleep_mode: bool | None
    enable_tower_connector_lora: bool | None
    enable_trace_replay: bool | None
    enforce_eager: bool | None
    engram_config: Any
    eplb_config: Any
    expert_placement_strategy: Any
    fail_on_environ_validation: bool | None
    fault_tolerance_config: Any
    fingerprint_mode: Any
    fingerprint_value: Any
    fully_sharded_loras: bool | None
    gdn_prefill_backend: Any
    grpc: bool | None
    grpc_port: Any
    guided_decoding_backend: Any
    h11_max_header_count: Any
    h11_max_incomplete_event_size: Any
    headless: bool | None
    interleave_mm_strings: bool | None
    io_processor_plugin: Any
    ir_op_priority: Any
    jit_monitor_mode: Any
    jit_monitor_verbose: bool | None
    kda_decode_backend: Any
    kda_prefill_backend: Any
    kernel_config: Any
    kv_cache_dtype_skip_layers: Any
    kv_cache_memory_bytes: Any
    kv_cache_metrics: bool | None
    kv_cache_metrics_sample: Any
    kv_events_config: Any
    kv_offloading_backend: Any
    kv_offloading_size: Any
    kv_sharing_fast_prefill: bool | None
    kv_transfer_config: Any
    language_model_only: bool | None
    limit_mm_per_prompt: Any
    linear_backend: Any
    log_error_stack: bool | None
    logging_config: Any
    logits_processors: Any
    long_prefill_token_threshold: Any
    long_prefill_token_threshold_adaptive: bool | None
    lora_dtype: Any
    lora_extra_vocab_size: Any
    lora_target_modules: Any
    mamba_backend: Any
    mamba_block_size: Any
    mamba_cache_dtype: Any
    mamba_cache_mode: Any
    mamba_cache_philox_rounds: Any
    mamba_config: Any
    mamba_ssm_cache_dtype: Any
    mamba_ssu_algorithm: Any
    master_addr: Any
    master_port: Any
    max_cpu_loras: Any
    max_cudagraph_capture_size: Any
    max_lora_cls_labels: Any
    max_num_active_seqs: Any
    max_num_partial_prefills: Any
    max_num_queued_reqs: Any
    max_num_queued_tokens: Any
    max_num_scheduled_tokens: Any
    max_parallel_loading_workers: Any
    max_seq_len_to_capture: Any
    media_io_kwargs: Any
    mm_device_do_normalize: bool | None
    mm_encoder_attn_backend: Any
    mm_encoder_attn_dtype: Any
    mm_encoder_fp8_scale_path: Any
    mm_encoder_fp8_scale_save_margin: Any
    mm_encoder_fp8_scale_save_path: Any
    mm_encoder_only: bool | None
    mm_encoder_tp_mode: Any
    mm_hasher_algorithm: Any
    mm_ipc_gpu_memory_gb: Any
    mm_processor_cache_gb: Any
    mm_processor_cache_type: Any
    mm_processor_device: Any
    mm_processor_kwargs: Any
    mm_shm_cache_max_object_size_mb: Any
    mm_tensor_ipc: Any
    model_class_overrides: Any
    model_impl: Any
    model_loader_extra_config: Any
    model_weights: Any
    moe_backend: Any
    multi_step_stream_outputs: Any
    nnodes: Any
    node_rank: Any
    num_gpu_blocks_override: Any
    num_scheduler_steps: Any
    numa_bind: bool | None
    numa_bind_cpus: Any
    numa_bind_nodes: Any
    offload_backend: Any
    offload_group_size: Any
    offload_num_in_group: Any
    offload_params: Any
    offload_prefetch_step: Any
    optimization_level: Any
    per_request_spec_decode_metrics: Any
    performance_mode: Any
    preemption_mode: Any
    prefill_context_parallel_size: Any
    prefill_schedule_interval: Any
    prefix_cache_retention_interval: Any
    prefix_caching_hash_algo: Any
    prefix_match_unit: Any
    profiler_config: Any
    pt_load_map_location: Any
    quantization_config: Any
    ray_workers_use_nsight: bool | None
    renderer_num_workers: Any
    replayssm_buffer_len: Any
    return_sampling_mask: bool | None
    rope_scaling: Any
    rope_theta: Any
    safetensors_load_strategy: Any
    safetensors_prefetch_block_size: Any
    safetensors_prefetch_num_threads: Any
    scheduler_cls: Any
    scheduler_delay_factor: Any
    scheduler_reserve_full_isl: bool | None
    show_hidden_metrics_for_version: Any
    skip_mm_profiling: bool | None
    sleep_mode_offload_cudagraph: bool | None
    sleep_preserve_parameter_names: Any
    sparse_indexer_topk_backend: Any
    spec_method: Any
    spec_model: Any
    spec_tokens: Any
    specialize_active_lora: bool | None
    sse_keep_alive_interval: Any
    structured_outputs_config: Any
    swa_bounded_replay: bool | None
    swap_space: Any
    task: Any
    tokenizer_mode: Any
    tokens_only: bool | None
    tool_server: Any
    trust_remote_code: bool | None
    trust_request_mm_kwargs: bool | None
    ubatch_size: Any
    use_fp64_gumbel: bool | None
    use_replayssm: bool | None
    use_tqdm_on_load: bool | None
    use_v2_block_manager: bool | None
    uvicorn_log_level: Any
    video_pruning_method: Any
    video_pruning_rate: Any
    watermark: Any
    watermark_config: Any
    worker_cls: Any

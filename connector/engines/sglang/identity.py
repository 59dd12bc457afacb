"""Finds SGLang's options that belong to a namespace: all options not at their defaults, except ``UNCOUNTED``.

An option that nobody has thought about counts: the price is a cold cache, never a wrong token.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from sglang.srt.arg_groups.overrides import resolution_result

from ....tiers.errors import ConfigError
from ...identity.model_files import files_digest, value_digest

#: Why options cannot change the meaning of a page -> their exact names. A pattern would also match a new option.
UNCOUNTED: Mapping[str, str] = {
    "names the model, whose weights count": "model_path trust_remote_code revision served_model_name download_dir",
    "a field of the namespace": "page_size tp_size dcp_size pp_size attn_cp_size",
    "where the server is, and what it serves": (
        "tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num "
        "skip_tokenizer_init is_embedding nccl_port dist_init_addr gated_launch_port host port fastapi_root_path "
        "smg_grpc_mode grpc_mode grpc_port grpc_worker_threads sidecar sidecar_args skip_server_warmup warmups "
        "enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile ssl_certfile "
        "ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key chat_template "
        "trust_request_chat_template hf_chat_template_name completion_template file_storage_path enable_cache_report "
        "return_input_ids return_output_ids reasoning_parser default_chat_template_kwargs strip_thinking_cache "
        "enable_strict_thinking tool_call_parser tool_server sampling_defaults asr_max_buffer_seconds "
        "asr_max_concurrent_sessions preferred_sampling_params allow_auto_truncate stream_interval batch_notify_size "
        "stream_response_default_include_usage incremental_streaming_output enable_streaming_session log_level_http "
        "smg_http_sidecar_port tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels "
        "load_publish_endpoint otlp_traces_endpoint constrained_json_whitespace_pattern "
        "constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt sampling_backend grammar_backend "
        "decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints allowed_media_domains "
        "media_url_max_file_size_mb disaggregation_bootstrap_port encoder_urls encoder_bootstrap_port "
        "encoder_register_urls remote_instance_weight_loader_seed_instance_ip "
        "remote_instance_weight_loader_seed_instance_service_port engine_info_bootstrap_port "
        "enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout "
        "enable_tokenizer_batch_encode disable_tokenizer_batch_decode enable_custom_logit_processor "
        "enable_return_hidden_states return_hidden_states_mode enable_return_routed_experts "
        "enable_return_indexer_topk sampling_mask_max_tokens disable_outlines_disk_cache enable_response_store "
        "enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window "
        "watermark_mixing_probability watermark_max_probability watermark_default_enabled watermark_enforce_all "
        "grpc_response_timeout_secs enable_http_worker_reuseport enable_return_aux_hidden_states "
        "return_aux_hidden_state_layer_ids"
    ),
    "what is logged and measured": (
        "log_level log_requests log_requests_level log_requests_format log_requests_target "
        "uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics enable_mfu_metrics "
        "enable_metrics_for_all_schedulers load_snapshot_publish_interval extra_metric_labels "
        "bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets "
        "generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging "
        "kv_events_config enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name "
        "enable_trace trace_modules export_metrics_to_file export_metrics_to_file_dir stat_loggers "
        "enable_layerwise_nvtx_marker otlp_service_name"
    ),
    "when something is computed, not what": (
        "mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size "
        "prefill_decode_interval max_prefill_tokens prefill_max_requests schedule_policy enable_priority_scheduling "
        "disable_priority_preemption default_priority_value abort_on_priority_when_disabled "
        "schedule_low_priority_values_first priority_scheduling_preemption_threshold retraction_policy "
        "schedule_conservativeness disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval "
        "enable_mixed_chunk dist_timeout nnodes node_rank pp_max_micro_batch_size pp_async_batch_depth dp_size "
        "attn_dp_size load_balance_method enable_dp_attention_local_control_broadcast enable_p2p_check base_gpu_id "
        "gpu_id_step random_seed watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray custom_sigquit_handler "
        "numa_node cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode "
        "cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context "
        "disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding "
        "enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph pre_warm_nccl spec_trace_dir "
        "elastic_ep_scale_timeout max_mamba_cache_size mamba_full_memory_ratio enable_broadcast_mm_inputs_process "
        "mm_processor_worker_num mm_io_worker_num mm_preprocess_cache_size_mb limit_mm_data_per_request "
        "enable_lora_overlap_loading max_loaded_loras max_loras_per_batch lora_eviction_policy "
        "lora_drain_wait_threshold enable_two_batch_overlap enable_single_batch_overlap "
        "tbo_token_distribution_threshold cpu_offload_gb offload_group_size offload_num_in_group "
        "offload_prefetch_step offload_mode disaggregation_mode disaggregation_transfer_backend "
        "disaggregation_ib_device disaggregation_decode_enable_radix_cache "
        "disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup "
        "num_reserved_decode_tokens disaggregation_decode_extra_slots disaggregation_decode_polling_interval "
        "optimistic_prefill_attempts encoder_only encoder_transfer_backend enable_pdmux weight_loader_disable_mmap "
        "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load "
        "remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend "
        "remote_instance_weight_loader_start_seed_via_transfer_engine enable_prefill_delayer "
        "prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms "
        "min_free_slots_delay enable_memory_saver weight_cache_timeout disaggregation_enable_kv_checksum "
        "enable_pd_role_switch cuda_graph_max_seq_len_prefill disaggregation_decode_host_receive_threshold "
        "disaggregation_decode_allocation_policy prefill_decode_interval_min_bs "
        "prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets "
        "prefill_delayer_wait_seconds_buckets gc_threshold"
    ),
    "how pages are cached": (
        "swa_full_tokens_ratio radix_eviction_policy radix_eviction_policy_config disable_radix_cache "
        "enable_session_radix_cache radix_cache_backend mamba_radix_cache_strategy uses_mamba_radix_cache "
        "enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size hicache_write_policy "
        "hicache_io_backend hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy "
        "hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval "
        "hicache_storage_prefetch_retry_max_attempts _radix_eviction_policy_explicitly_set "
        "hicache_host_memory_fraction _swa_full_tokens_ratio_explicitly_set"
    ),
    "counted by its content": "lora_paths",
}
#: The same for variables, without ``SGLANG_``.
UNCOUNTED_VARIABLES: Mapping[str, str] = {
    "where this process is": "BACKUP_PORT_BASE DP_RANK GRPC_PORT HOST_IP PORT RUN_ID TCP_STORE_PORT TP_RANK",
    "how pages are cached": (
        "ENABLE_HICACHE_BUFFER_ANCHOR_LOCK ENABLE_HICACHE_SWA_TAIL_ONLY_BACKUP HICACHE_BUFFER_ANCHOR_LOCK_CAP "
        "HICACHE_DECODE_OFFLOAD_STRIDE HICACHE_FILE_BACKEND_ENABLE_METADATA_CACHE HICACHE_FILE_BACKEND_EVICTION_RATIO "
        "HICACHE_FILE_BACKEND_MAX_SIZE HICACHE_FILE_BACKEND_METADATA_TTL HICACHE_FILE_BACKEND_MIN_FREE_SPACE "
        "HICACHE_FILE_BACKEND_STORAGE_DIR HICACHE_HF3FS_CONFIG_PATH HICACHE_HOST_HUGEPAGE HICACHE_HOST_HUGEPAGE_SIZE "
        "HICACHE_HOST_MEM_BACKEND HICACHE_HOST_NUMA_NODE HICACHE_HOST_PARALLEL_ALLOC_THREADS HICACHE_HOST_PREFAULT "
        "HICACHE_HOST_REGISTER_CHUNK_GB HICACHE_MEMCACHE_CONFIG_PATH HICACHE_MOONCAKE_CONFIG_PATH "
        "HICACHE_MOONCAKE_REUSE_TE HICACHE_NIXL_BACKEND_PLUGIN HICACHE_NIXL_BACKEND_STORAGE_DIR "
        "HICACHE_NIXL_USE_DIRECT_IO HICACHE_SIMM_CONFIG_PATH HICACHE_SIMM_JSON_ENV_VAR "
        "HICACHE_SKIP_HOST_DUPLICATE_RECLAIM HICACHE_TMA_TRANSFER"
    ),
    "what is logged and measured": (
        "DSPARK_LOG_SPS_PRED_INTERVAL ENABLE_CUDA_GRAPH_CAPTURE_TRACE ENABLE_METRICS_DEVICE_TIMER "
        "ENABLE_METRICS_DP_ATTENTION EXPERT_LOCATION_UPDATER_LOG_INPUT EXPERT_LOCATION_UPDATER_LOG_METRICS "
        "JIT_BENCHMARK_DISABLE_LOG_BANDWIDTH JIT_BENCHMARK_DISABLE_LOG_FLOPS JIT_LOG_LEVEL JIT_LOG_RESOURCE_USAGE "
        "KERNEL_API_LOGDEST KERNEL_API_LOGLEVEL LOGGING_CONFIG_PATH LOG_DECODE_GRAPH_KEY LOG_EXPERT_LOCATION_METADATA "
        "LOG_FORWARD_ITERS LOG_GC LOG_LAZY_COMPACTION_STATS LOG_LAZY_COMPACTION_STATS_INTERVAL_SEC LOG_MS "
        "LOG_PICKLE_IPC_OBJECTS LOG_REQUEST_EXCEEDED_MS LOG_REQUEST_HEADERS LOG_SCHEDULER_STATUS_INTERVAL "
        "LOG_SCHEDULER_STATUS_TARGET MEM_PROFILE_MAX_ENTRIES NSYS_PROFILING OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE "
        "OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS PERF_LOG_DIR PREFILL_DELAYER_DEBUG_LOG PROFILE_BY_STAGE_DECODE_MIN_BS "
        "PROFILE_RECORD_SHAPES PROFILE_V2 PROFILE_WITH_STACK ROUTING_KEY_POLICY_DEBUG_LOG TORCH_PROFILER_DIR "
        "TRACE_ASYNC TRACE_ASYNC_FLUSH_THRESHOLD TRACE_LEVEL"
    ),
    "how long something may take": (
        "DISAGGREGATION_BOOTSTRAP_TIMEOUT DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT "
        "DISAGGREGATION_ENGINE_INIT_TIMEOUT DISAGGREGATION_WAITING_TIMEOUT DISAGGREGATION_ZMQ_SEND_TIMEOUT "
        "DISAGG_STARTUP_TIMEOUT ENCODER_BOOTSTRAP_HEALTH_CHECK_TIMEOUT ENCODER_GRPC_TIMEOUT_SECS ENCODER_HTTP_TIMEOUT "
        "ENCODER_RECV_TIMEOUT ENCODER_REQ_TIMEOUT ENCODER_SEND_TIMEOUT FAILED_SESSION_IDLE_TIMEOUT_S "
        "FLUSH_CACHE_TIMEOUT HEALTH_CHECK_TIMEOUT MORI_TRANSFER_TIMEOUT_MS REQUEST_STATE_WAIT_TIMEOUT "
        "REQ_RUNNING_TIMEOUT REQ_WAITING_TIMEOUT TIMEOUT_KEEP_ALIVE UVICORN_WORKER_HEALTHCHECK_TIMEOUT "
        "WAIT_PORT_TIMEOUT WAIT_WEIGHTS_READY_TIMEOUT WARMUP_TIMEOUT"
    ),
}
_UNCOUNTED = frozenset(name for names in UNCOUNTED.values() for name in names.split())
_UNCOUNTED_VARIABLES = frozenset(f"SGLANG_{name}" for names in UNCOUNTED_VARIABLES.values() for name in names.split())


def counted(server_args: Any, environ: Mapping[str, str] = os.environ, ignore: Any = ()) -> dict[str, Any]:
    """Return the options that count, and variables: name -> value, or a digest where it may be secret or long.

    Args:
        server_args: SGLang's ServerArgs.
        ignore: names that do not count, because the operator says that they do not change the KV.

    Raises:
        ConfigError: a name in ``ignore`` is not an option, or the options cannot be read.
    """
    if not isinstance(server_args, msgspec.Struct):
        raise ConfigError(f"is {type(server_args).__name__}, whose fields are unknown", field="server_args")
    found = dict(_options(server_args)) | {
        name: value
        for name, value in environ.items()
        if name.startswith("SGLANG_") and name not in _UNCOUNTED_VARIABLES
    }
    names = {field.name for field in msgspec.structs.fields(type(server_args))}
    for name in ignore:
        if name not in names and not name.startswith("SGLANG_"):
            raise ConfigError(f"{name} is not an option of SGLang", field="identity.ignore")
    return {name: _shown(value) for name, value in sorted(found.items()) if name not in ignore}


def _options(server_args: Any) -> Iterator[tuple[str, Any]]:
    for each in msgspec.structs.fields(type(server_args)):
        if each.name in _UNCOUNTED:
            continue
        value = resolution_result(server_args, each.name)
        default = each.default if each.default is not msgspec.NODEFAULT else None
        if each.default_factory is not msgspec.NODEFAULT:
            default = each.default_factory()
        if value_digest(value) != value_digest(default):
            yield each.name, value
    if resolution_result(server_args, "load_format") == "dummy":
        yield "random_seed", resolution_result(server_args, "random_seed")
    # SGLang names an adapter by its name and path, whatever is there now.
    for number, adapter in enumerate(resolution_result(server_args, "lora_paths") or ()):
        path = getattr(adapter, "lora_path", adapter)
        path = path.get("lora_path") if isinstance(path, Mapping) else str(path).partition("=")[2] or path
        digest = files_digest(str(path), also="adapter_config.json")
        if digest is None:
            raise ConfigError(f"{path!r} is not a folder here, so its content is unknown", field="lora_paths")
        yield f"lora_paths.{number}", digest


def _shown(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else value_digest(value)

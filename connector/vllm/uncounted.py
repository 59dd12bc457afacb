"""Fields of vLLM's configuration that are not part of a namespace, each with the reason.

``docs/vllm.md`` shows these tables (``make docs``). This module does not import vLLM, so the tables can be read without
it.
"""

from __future__ import annotations

from collections.abc import Mapping

_ELSEWHERE = "is in the namespace in another field"
_WEIGHTS = "is in the namespace as part of the weights' revision"
_MEMORY = "sets memory use or the number of concurrent requests"
_PLACE = "sets where processes run and how they communicate"
_OUTPUT = "affects only sampling, output, or text processing before and after the model"
_OBSERVED = "sets logging, monitoring or profiling"
_RUNTIME = "changes while the engine starts or runs"
_COMPILED = "sets which graphs are captured and where compiled code is kept"

#: Class of vLLM's config objects -> why -> its fields ("*": all) that cannot change the meaning of stored KV.
IGNORED: Mapping[str, Mapping[str, str]] = {
    "VllmConfig": {
        _PLACE: "instance_id shutdown_timeout kv_transfer_config",
        _WEIGHTS: "quant_config",
    },
    "ModelConfig": {
        _WEIGHTS: "model model_weights revision quantization hf_config hf_text_config hf_image_processor_config "
        "hf_config_path hf_overrides max_model_len original_max_model_len spec_target_max_model_len "
        "generation_config override_generation_config model_arch_config",
        _OUTPUT: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init served_model_name max_logprobs "
        "logprobs_mode return_sampling_mask use_fp64_gumbel logits_processors io_processor_plugin "
        "renderer_num_workers allowed_local_media_path allowed_media_domains",
        _MEMORY: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
        "enable_nccl_comm_suspend enable_cumem_allocator",
        _COMPILED: "enforce_eager",
    },
    "CacheConfig": {
        _ELSEWHERE: "block_size user_specified_block_size _block_size_resolved hash_block_size "
        "prefix_caching_hash_algo kv_cache_layout",
        _MEMORY: "gpu_memory_utilization num_gpu_blocks num_gpu_blocks_override num_cpu_blocks "
        "simple_cpu_offload_num_blocks kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes "
        "kv_offloading_size kv_offloading_backend enable_prefix_caching prefix_cache_retention_interval "
        "cache_hit_alignment_tokens",
    },
    "ParallelConfig": {
        _ELSEWHERE: "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size world_size",
        _PLACE: "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
        "data_parallel_index data_parallel_master_ip data_parallel_master_port data_parallel_rpc_port "
        "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval "
        "_data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank rank node_rank "
        "nnodes master_addr master_port distributed_executor_backend placement_group "
        "ray_workers_use_nsight ray_runtime_env numa_bind numa_bind_nodes numa_bind_cpus "
        "assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds "
        "max_parallel_loading_workers disable_custom_all_reduce disable_nccl_for_dp_synchronization "
        "enable_shm_tensor_arena elastic_ep_max_dp_size enable_fault_tolerance fault_tolerance_config",
    },
    "SchedulerConfig": {
        _MEMORY: "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
        "max_num_queued_reqs max_num_queued_tokens long_prefill_token_threshold "
        "long_prefill_token_threshold_adaptive enable_chunked_prefill max_num_encoder_input_tokens "
        "encoder_cache_size policy disable_chunked_mm_input scheduler_reserve_full_isl watermark "
        "prefill_schedule_interval async_scheduling stream_interval",
        _ELSEWHERE: "is_multimodal_model runner_type",
    },
    "DeviceConfig": {_PLACE: "device"},
    "LoadConfig": {
        _WEIGHTS: "load_format model_loader_extra_config",
        _PLACE: "download_dir device use_tqdm_on_load pt_load_map_location safetensors_load_strategy "
        "safetensors_prefetch_num_threads safetensors_prefetch_block_size",
    },
    "OffloadConfig": {_MEMORY: "*"},
    "AttentionConfig": {
        _ELSEWHERE: "mla_prefill_backend",
        _COMPILED: "flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph "
        "sparse_mla_prefill_workspace_factor",
    },
    "KernelConfig": {_COMPILED: "enable_flashinfer_autotune enable_cutedsl_warmup enable_jit_warmup"},
    "CompilationConfig": {
        _COMPILED: "debug_dump_path cache_dir compile_cache_save_format local_cache_dir cudagraph_mode "
        "cudagraph_num_of_warmups cudagraph_capture_sizes max_cudagraph_capture_size cudagraph_copy_inputs "
        "cudagraph_specialize_lora cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes "
        "decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints compile_ranges_split_points "
        "splitting_ops inductor_compile_config inductor_passes "
        "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
        "encoder_cudagraph_max_frames_per_batch cudagraph_mm_encoder",
        _RUNTIME: "enabled_custom_ops disabled_custom_ops traced_files compilation_time encoder_compilation_time "
        "static_forward_context static_all_moe_layers bs_to_padded_graph_size",
    },
    "MultiModalConfig": {
        _MEMORY: "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb limit_per_prompt"
    },
    "LoRAConfig": {_MEMORY: "max_loras max_cpu_loras max_lora_rank specialize_active_lora"},
    "SpeculativeConfig": {
        _ELSEWHERE: "target_model_config target_parallel_config draft_parallel_config model revision",
        _OUTPUT: "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length "
        "draft_sample_method enable_adaptive_verification",
    },
    **{
        name: {_OBSERVED: "*"}
        for name in ("LoggingConfig", "ObservabilityConfig", "ProfilerConfig", "WatchdogConfig", "KVEventsConfig")
    },
    **{name: {_OUTPUT: "*"} for name in ("StructuredOutputsConfig", "AuxOutputConfig")},
}

#: Why -> ``VLLM_*`` variables that cannot change the meaning of stored KV. (vLLM has its own list of variables that do
#: not affect compiled graphs. Some of them choose weights or how images are decoded; kvtiers counts these.)
IGNORED_VARIABLES: Mapping[str, str] = {
    _PLACE: "API_KEY CACHE_ROOT CONFIG_ROOT ASSETS_CACHE ASSETS_CACHE_MODEL_CLEAN CUDA_COMPATIBILITY_PATH "
    "ENABLE_CUDA_COMPATIBILITY DIST_IDENT DP_MASTER_IP DP_MASTER_PORT DP_RANK DP_RANK_LOCAL DP_SIZE "
    "ELASTIC_EP_SCALE_UP_LAUNCH ENABLE_V1_MULTIPROCESSING EXECUTE_MODEL_TIMEOUT_SECONDS HOST_IP "
    "HTTP_MAX_REQUEST_BODY_SIZE HTTP_TIMEOUT_KEEP_ALIVE KEEP_ALIVE_ON_ENGINE_DEATH LOOPBACK_IP "
    "NIXL_SIDE_CHANNEL_HOST NIXL_SIDE_CHANNEL_PORT OBJECT_STORAGE_SHM_BUFFER_NAME PORT RAY_BUNDLE_INDICES "
    "RPC_BASE_PATH RPC_TIMEOUT SERVER_DEV_MODE SKIP_MODEL_NAME_VALIDATION SKIP_VERSION_SUFFIX "
    "TARGET_DEVICE WORKER_MULTIPROC_METHOD WORKER_SHUTDOWN_TIMEOUT_SECONDS ENGINE_READY_TIMEOUT_S "
    "CPU_OMP_THREADS_BIND CPU_NUM_OF_RESERVED_CPU",
    _MEMORY: "CPU_KVCACHE_SPACE MEDIA_CACHE MEDIA_CACHE_MAX_SIZE_MB MEDIA_CACHE_TTL_HOURS MEDIA_FETCH_MAX_RETRIES "
    "MEDIA_LOADING_THREAD_COUNT MEDIA_URL_ALLOW_REDIRECTS AUDIO_FETCH_TIMEOUT IMAGE_FETCH_TIMEOUT "
    "VIDEO_FETCH_TIMEOUT MAX_AUDIO_CLIP_FILESIZE_MB MAX_AUDIO_DECODE_BYTES MAX_AUDIO_DECODE_DURATION_S "
    "MAX_AUDIO_PREPROCESS_WORKERS MAX_EMBED_DECODE_BYTES MAX_MEDIA_REQUEST_DECODE_BYTES "
    "MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB V1_OUTPUT_PROC_CHUNK_SIZE",
    _OBSERVED: "CONFIGURE_LOGGING DEBUG_DUMP_PATH DEBUG_LOG_API_SERVER_RESPONSE DO_NOT_TRACK LOGGING_COLOR "
    "LOGGING_CONFIG_PATH LOGGING_LEVEL LOGGING_PREFIX LOGGING_STREAM LOG_STATS_INTERVAL NO_USAGE_STATS "
    "REQUEST_BODY_LOG_LEVEL RINGBUFFER_WARNING_INTERVAL TRACE_FUNCTION USAGE_SOURCE USAGE_STATS_SERVER",
    _OUTPUT: "CHAT_TEMPLATE_FUEL",
    _COMPILED: "USE_AOT_COMPILE USE_BREAKABLE_CUDAGRAPH ENABLE_STARTUP_PLAN FLASHINFER_AUTOTUNE_CACHE_DIR "
    "FORCE_AOT_LOAD TRITON_JIT_WARMUP_NUM_THREADS XLA_CACHE_PATH DISABLE_COMPILE_CACHE",
    _ELSEWHERE: "KV_CACHE_LAYOUT",
}

"""Fields of vLLM's configuration that are not part of a namespace, each with the reason.

``docs/sharing.md`` links to these tables, and the documentation site shows them as a page. This module does not import
vLLM, so the tables can be read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ELSEWHERE = "is in the namespace in another field"
_WEIGHTS = "is in the namespace as part of the weights' revision"
_MEMORY = "sets memory use or the number of concurrent requests"
_PLACE = "sets where processes run and how they communicate"
_OUTPUT = "affects only sampling, output, or text processing before and after the model"
_OBSERVED = "sets logging, monitoring or profiling"
_RUNTIME = "changes while the engine starts or runs"
_COMPILED = "sets how kernels are compiled, captured and scheduled; the computation stays the same, up to rounding"
_BUILD = "describes how vLLM was built or packaged"
_SOMETIMES = "counts only where it has an effect"

#: Class of vLLM's config objects -> why -> its fields ("*": all) that cannot change the meaning of stored KV.
IGNORED: Mapping[str, Mapping[str, str]] = {
    "VllmConfig": {
        _PLACE: "instance_id shutdown_timeout kv_transfer_config",
        _WEIGHTS: "quant_config",
        _MEMORY: "performance_mode",
        _COMPILED: "optimization_level",
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
        _PLACE: "hf_token",
        _COMPILED: "enforce_eager",
        _SOMETIMES: "seed trust_remote_code code_revision",
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
    "KernelConfig": {_COMPILED: "enable_flashinfer_autotune enable_cutedsl_warmup enable_jit_warmup ir_op_priority"},
    "CompilationConfig": {
        _COMPILED: "debug_dump_path cache_dir compile_cache_save_format local_cache_dir cudagraph_mode "
        "cudagraph_num_of_warmups cudagraph_capture_sizes max_cudagraph_capture_size cudagraph_copy_inputs "
        "cudagraph_specialize_lora cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes "
        "decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints compile_ranges_split_points "
        "splitting_ops inductor_compile_config inductor_passes "
        "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
        "encoder_cudagraph_max_frames_per_batch cudagraph_mm_encoder mode custom_ops ir_enable_torch_wrap "
        "compile_mm_encoder use_inductor_graph_partition dynamic_shapes_config fast_moe_cold_start",
        _RUNTIME: "enabled_custom_ops disabled_custom_ops traced_files compilation_time encoder_compilation_time "
        "static_forward_context static_all_moe_layers bs_to_padded_graph_size",
        _SOMETIMES: "backend",
    },
    "PassConfig": {
        _COMPILED: "fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops fuse_allreduce_rms "
        "enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm "
        "fuse_rope_kvcache fuse_qk_norm_rope_kvcache rope_kvcache_fusion_max_token_num "
        "fi_allreduce_fusion_max_size_mb",
    },
    "KVTransferConfig": {_PLACE: "*"},
    "ECTransferConfig": {
        _PLACE: "engine_id ec_buffer_device ec_buffer_size ec_role ec_ip ec_port ec_connector_extra_config",
    },
    "MultiModalConfig": {
        _MEMORY: "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb limit_per_prompt"
    },
    "LoRAConfig": {_MEMORY: "max_loras max_cpu_loras max_lora_rank specialize_active_lora"},
    "SpeculativeConfig": {
        _ELSEWHERE: "target_model_config target_parallel_config draft_parallel_config model revision",
        _OUTPUT: "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length "
        "draft_sample_method enable_adaptive_verification",
        _COMPILED: "enforce_eager",
    },
    **{
        name: {_OBSERVED: "*"}
        for name in ("LoggingConfig", "ObservabilityConfig", "ProfilerConfig", "WatchdogConfig", "KVEventsConfig")
    },
    **{
        name: {_OUTPUT: "*"}
        for name in ("StructuredOutputsConfig", "AuxOutputConfig", "ReasoningConfig", "WatermarkConfig")
    },
}

#: Why -> ``VLLM_*`` variables that cannot change the meaning of stored KV. (vLLM has its own list of variables that do
#: not affect compiled graphs. Some of them choose weights or how images are decoded; kvtiers counts these.)
IGNORED_VARIABLES: Mapping[str, str] = {
    _BUILD: "BUILD_COMMIT BUILD_PIPELINE BUILD_URL CUDART_SO_PATH DOCKER_BUILD_CONTEXT HAS_FLASHINFER_CUBIN IMAGE_TAG "
    "MAIN_CUDA_VERSION NCCL_INCLUDE_PATH NCCL_SO_PATH SKIP_PRECOMPILED_VERSION_SUFFIX SKIP_VERSION_SUFFIX "
    "TARGET_DEVICE USE_PRECOMPILED USE_PRECOMPILED_RUST",
    _PLACE: "ALLOW_INSECURE_SERIALIZATION ALLREDUCE_USE_FLASHINFER ALLREDUCE_USE_FLASHINFER_PCIE_IPC "
    "ALLREDUCE_USE_SYMM_MEM API_KEY ASSETS_CACHE ASSETS_CACHE_MODEL_CLEAN CACHE_ROOT CONFIG_ROOT "
    "CPU_NUM_OF_RESERVED_CPU CPU_OMP_THREADS_BIND CUDA_COMPATIBILITY_PATH DBO_COMM_SMS DEEPEP_BUFFER_SIZE_MB "
    "DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE DEEPEP_LOW_LATENCY_USE_MNNVL DEEPEP_V2_ALLOW_HYBRID_MODE "
    "DEEPEP_V2_PREFER_OVERLAP DISABLE_PYNCCL DISABLE_REQUEST_ID_RANDOMIZATION DISTRIBUTED_USE_SPLIT_GROUP DIST_IDENT "
    "DP_MASTER_IP DP_MASTER_PORT DP_RANK DP_RANK_LOCAL DP_SIZE EC_SIDE_CHANNEL_HOST EC_SIDE_CHANNEL_PORT "
    "ELASTIC_EP_DRAIN_REQUESTS ELASTIC_EP_SCALE_UP_LAUNCH ENABLE_CUDA_COMPATIBILITY ENABLE_V1_MULTIPROCESSING "
    "ENGINE_READY_TIMEOUT_S EXECUTE_MODEL_TIMEOUT_SECONDS FLASHINFER_ALLREDUCE_BACKEND "
    "FLASHINFER_WORKSPACE_BUFFER_SIZE GPU_NIC_PCIE_MAPPING HOST_IP HTTP_MAX_REQUEST_BODY_SIZE "
    "HTTP_TIMEOUT_KEEP_ALIVE KEEP_ALIVE_ON_ENGINE_DEATH LOOPBACK_IP MOONCAKE_ABORT_REQUEST_TIMEOUT "
    "MOONCAKE_BOOTSTRAP_PORT MOONCAKE_CONNECTOR_TIMEOUT MOONCAKE_DISK_STAGING_USABLE_RATIO MOONCAKE_LOAD_RECV_THREADS "
    "MQ_MAX_CHUNK_BYTES_MB MSGPACK_ZERO_COPY_THRESHOLD NIC_SELECTION_VARS NIXL_SIDE_CHANNEL_HOST "
    "NIXL_SIDE_CHANNEL_PORT OBJECT_STORAGE_SHM_BUFFER_NAME P2P_HANDSHAKE_TIMEOUT_S P2P_IDLE_TIMEOUT_S P2P_MAX_PEERS "
    "P2P_SIDE_CHANNEL_HOST P2P_SIDE_CHANNEL_PORT PORT PROCESS_NAME_PREFIX RANDOMIZE_DP_DUMMY_INPUTS "
    "RAY_BUNDLE_INDICES RAY_DP_PACK_STRATEGY RAY_DP_PLACEMENT_NODE_IPS RAY_EXTRA_ENV_VARS_TO_COPY "
    "RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY RAY_PER_WORKER_GPUS RPC_BASE_PATH RPC_TIMEOUT SERVER_DEV_MODE "
    "SKIP_MODEL_NAME_VALIDATION SKIP_P2P_CHECK USE_NCCL_SYMM_MEM USE_RAY_COMPILED_DAG_CHANNEL_TYPE "
    "USE_RAY_COMPILED_DAG_OVERLAP_COMM USE_RAY_V2_EXECUTOR_BACKEND USE_RAY_WRAPPED_PP_COMM USE_SPINLOOP_EXT "
    "WORKER_MULTIPROC_METHOD WORKER_SHUTDOWN_TIMEOUT_SECONDS XPU_PP_MICROBATCH",
    _MEMORY: "ALLOW_LONG_MAX_MODEL_LEN AUDIO_FETCH_TIMEOUT CPU_KVCACHE_SPACE FASTSAFETENSORS_QUEUE_SIZE "
    "IMAGE_FETCH_TIMEOUT KV_OFFLOAD_MAX_BATCH_DESCRIPTORS MAX_AUDIO_CLIP_FILESIZE_MB MAX_AUDIO_DECODE_BYTES "
    "MAX_AUDIO_DECODE_DURATION_S MAX_AUDIO_PREPROCESS_WORKERS MAX_EMBED_DECODE_BYTES MAX_IMAGE_PIXELS "
    "MAX_MEDIA_DOWNLOAD_SIZE_MB MAX_MEDIA_REQUEST_DECODE_BYTES MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB MEDIA_CACHE "
    "MEDIA_CACHE_MAX_SIZE_MB MEDIA_CACHE_TTL_HOURS MEDIA_FETCH_MAX_RETRIES MEDIA_LOADING_THREAD_COUNT "
    "MEDIA_URL_ALLOW_REDIRECTS MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS ROCM_SLEEP_MEM_CHUNK_SIZE "
    "SPARSE_INDEXER_MAX_LOGITS_MB USE_SIMPLE_KV_OFFLOAD V1_OUTPUT_PROC_CHUNK_SIZE VIDEO_FETCH_TIMEOUT "
    "WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY WEIGHT_OFFLOADING_DISABLE_UVA WSL2_ENABLE_PIN_MEMORY",
    _OBSERVED: "COMPUTE_NANS_IN_LOGITS CONFIGURE_LOGGING CPU_CI_ENV CUSTOM_SCOPES_FOR_PROFILING DEBUG_DUMP_PATH "
    "DEBUG_LOG_API_SERVER_RESPONSE DEBUG_MFU_METRICS DEBUG_WORKSPACE DISABLE_LOG_LOGO DO_NOT_TRACK GC_DEBUG "
    "GPU_SYNC_CHECK KV_EVENTS_USE_INT_BLOCK_HASHES LOGGING_COLOR LOGGING_CONFIG_PATH LOGGING_LEVEL LOGGING_PREFIX "
    "LOGGING_STREAM LOG_BATCHSIZE_INTERVAL LOG_MODEL_INSPECTION LOG_STATS_INTERVAL MOONCAKE_STORE_TIER_LOG "
    "NO_USAGE_STATS NVTX_SCOPES_FOR_PROFILING PATTERN_MATCH_DEBUG RAISE_ON_LOGIT_NANS REQUEST_BODY_LOG_LEVEL "
    "RINGBUFFER_WARNING_INTERVAL TRACE_FUNCTION USAGE_SOURCE USAGE_STATS_SERVER XLA_CHECK_RECOMPILATION",
    _OUTPUT: "ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN ALLOW_RUNTIME_LORA_UPDATING BEAM_ALWAYS_CONSTRAIN_OUTPUT "
    "CHAT_TEMPLATE_FUEL CHAT_TEMPLATE_RENDER_TIMEOUT ENABLE_COHERE_API ENABLE_RESPONSES_API_STORE "
    "ENFORCE_STRICT_TOOL_CALLING GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS GPT_OSS_SYSTEM_TOOL_MCP_LABELS "
    "LORA_RESOLVER_CACHE_DIR LORA_RESOLVER_HF_REPO_LIST MAX_BAD_WORDS_TOTAL_TOKENS MAX_COMPLETION_PROMPTS "
    "MAX_NUM_BAD_WORDS MAX_N_SEQUENCES MAX_STOP_STRINGS REGEX_COMPILATION_TIMEOUT_S RUST_FRONTEND_PATH "
    "SYSTEM_START_DATE TOOL_JSON_ERROR_AUTOMATIC_RETRY TOOL_PARSE_REGEX_TIMEOUT_SECONDS "
    "USE_EXPERIMENTAL_PARSER_CONTEXT USE_FASTOKENS USE_FLASHINFER_SAMPLER USE_RUST_BENCH USE_RUST_FRONTEND "
    "V1_USE_OUTLINES_CACHE XGRAMMAR_CACHE_MB XPU_USE_SAMPLER_KERNEL",
    _COMPILED: "COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD COMPILE_CACHE_SAVE_FORMAT DEEP_GEMM_WARMUP "
    "DISABLE_COMPILE_CACHE DISABLE_SHARED_EXPERTS_STREAM ENABLE_CUDAGRAPH_GC "
    "ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING ENABLE_INDUCTOR_MAX_AUTOTUNE ENABLE_PREGRAD_PASSES ENABLE_STARTUP_PLAN "
    "FLASHINFER_AUTOTUNE_CACHE_DIR FLASHINFER_AUTOTUNE_SKIP_OPS FORCE_AOT_LOAD LORA_DISABLE_PDL "
    "LORA_ENABLE_DUAL_STREAM MULTI_STREAM_GEMM_TOKEN_THRESHOLD SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD "
    "TRITON_FORCE_FIRST_CONFIG TRITON_JIT_WARMUP_NUM_THREADS TUNED_CONFIG_FOLDER USE_AOT_COMPILE "
    "USE_BREAKABLE_CUDAGRAPH USE_BYTECODE_HOOK USE_LAYERNAME USE_MEGA_AOT_ARTIFACT USE_STANDALONE_COMPILE "
    "XLA_CACHE_PATH",
    _ELSEWHERE: "KV_CACHE_LAYOUT",
    _SOMETIMES: "PLUGINS",
}

#: Fields that count, with the values that vLLM derives for most engines at their defaults. The log leaves them out.
USUAL: Mapping[str, tuple[Any, ...]] = {
    "device_config.device_type": ("cpu", "cuda"),
    "model_config.dtype": ("torch.bfloat16",),
    "parallel_config.dcp_comm_backend": ("ag_rs",),
    "parallel_config.dcp_q_replicate": (False,),
    "parallel_config.enable_batch_sharded_sampling": (False,),
    "parallel_config.is_moe_model": (False, True),  # the model's, not an option
    "parallel_config.worker_cls": ("vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker"),
    "scheduler_config.disable_hybrid_kv_cache_manager": (False,),
}

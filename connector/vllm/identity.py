"""What of an engine's configuration is part of its namespace: everything but what stands in the tables below.

Every field of every config object that vLLM hands over counts, and every ``VLLM_*`` variable that is set. So an option
that kvtiers has never heard of begins a namespace of its own: the price is a cold cache, never a wrong token. A field
at its default counts for nothing, so that releases with more or fewer fields agree.

The scheduler's process takes the identity, when vLLM makes its connector. (Workers of SharedStorageConnector, whose
configs have ranks and what a model's loading changed, take the scheduler's.)
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import os
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from connector.model_files import value_digest
from connector.vllm import versions
from tiers.errors import ConfigError
from tiers.plain_logs import get_logger

logger = get_logger(__name__)

#: Releases whose blocks are known to be alike where nothing else differs (``make e2e``), and whose options have the
#: same defaults where they have the same names. Any other one is on its own.
ERA = frozenset((0, minor) for minor in range(28, 34))

SHOWN_CHARS_MAX = 20  # of a choice's name; what is longer may be a secret

_ELSEWHERE = "is in the namespace by another of its fields"
_WEIGHTS = "the weights' revision has it (weights.py)"
_MEMORY = "how much memory and how many requests at once"
_PLACE = "where processes run and how they talk"
_OUTPUT = "what becomes of computed tokens, or text before and after them"
_OBSERVED = "what is observed, logged or profiled"
_RUNTIME = "changed while the engine starts or runs"
_COMPILED = "which graphs are captured and where compiled code is kept"

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

#: Why -> ``VLLM_*`` variables that cannot change the meaning of stored KV. (vLLM's own list of those that leave
#: compiled graphs alone also has some that choose weights or how pictures are read; those count here.)
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


def identity(
    vllm_config: Any, environ: Mapping[str, str] = os.environ, *, ignore: Collection[str] = ()
) -> dict[str, Any]:
    """What counts of an engine's configuration beyond its defaults: name -> value, as JSON has it.

    Args:
        vllm_config: vLLM's VllmConfig.
        ignore: names of options that do not count, because the operator says that they leave KV as it is.

    Raises:
        ConfigError: the config is not a dataclass, so its fields are not known; or a name to ignore is not an option.
    """
    if not dataclasses.is_dataclass(vllm_config):
        raise ConfigError(
            f"is {type(vllm_config).__name__}, which is not a dataclass, so what counts of it is not known",
            field="vllm_config",
        )
    found = dict(_counted(vllm_config, ""))
    for name, value in environ.items():
        if name.startswith("VLLM_") and name.removeprefix("VLLM_") not in _ignored_variables():
            found[name] = value
    if versions.release() not in ERA:
        found["vllm"] = versions.VERSION
    for name in ignore:
        if name not in found:
            _check_option(vllm_config, name)
    return {name: value for name, value in sorted(found.items()) if name not in ignore}


def identity_digest(found: Mapping[str, Any]) -> str | None:
    """Digest of an ``identity``; None where all is at its default."""
    return f"engine:{value_digest(found)}" if found else None


def readable(found: Mapping[str, Any]) -> dict[str, str]:
    """An ``identity`` that can be shown: values that may be secrets are replaced by digests."""
    return {name: _shown(value) for name, value in found.items()}


def log_identity(found: Mapping[str, Any]) -> None:
    """Say, once in a process, what counts."""
    if found:
        _log_identity(", ".join(f"{name}={value}" for name, value in readable(found).items()))


@cache
def _log_identity(shown: str) -> None:
    logger.info("part of the namespace, as not at its default: %s", shown)


def is_ignored(owner: type, name: str) -> bool:
    """Whether a field of a config class stands in the table."""
    return any(not {name, "*"}.isdisjoint(_ignored_fields(cls.__name__)) for cls in owner.__mro__)


def _check_option(vllm_config: Any, name: str) -> None:
    """Refuse a misspelled option, which would silently have no effect."""
    if name.startswith("VLLM_") or name == "vllm":
        return
    at = vllm_config
    for part in name.split("."):
        names = [field.name for field in dataclasses.fields(at)] if dataclasses.is_dataclass(at) else []
        if part not in names:
            if at is None:  # an object that this engine does not have
                return
            accepted = difflib.get_close_matches(part, names, n=3) or names
            raise ConfigError(
                f"{name} is not an option of vLLM {versions.VERSION}: {part} is not accepted, "
                f"{type(at).__name__} has {', '.join(accepted)}",
                field="identity.ignore",
            )
        at = getattr(at, part, None)


def _counted(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if is_ignored(type(config), field.name):
            continue
        place = f"{path}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _counted(value, f"{place}.")
        elif (plain := _plain(value, place)) != _plain(_default(field), place):
            yield place, plain


def _default(field: dataclasses.Field[Any]) -> Any:
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    # A pydantic dataclass may have its FieldInfo there.
    if (factory := getattr(default, "default_factory", None)) is not None:
        return factory()
    return getattr(default, "default", default)


def _plain(value: Any, place: str) -> Any:
    """A value as JSON has it, the same in every process and in whatever order it was written."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Mapping):
        return {str(name): _plain(each, place) for name, each in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple):
        return [_plain(each, place) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(each, place)) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(_counted(value, ""))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__module__ == "torch":  # a dtype or a device
        return str(value)
    _say_that_the_type_counts(place, f"{type(value).__module__}.{type(value).__qualname__}")
    return f"{type(value).__module__}.{type(value).__qualname__}"


@cache
def _say_that_the_type_counts(place: str, kind: str) -> None:
    if "PydanticUndefined" not in kind:
        logger.warning("%s is a %s, of which the namespace has the type alone", place, kind)


def _shown(value: Any) -> str:
    is_plain = value is None or isinstance(value, bool | int | float)
    is_name = isinstance(value, str) and len(value) <= SHOWN_CHARS_MAX and value.replace(".", "_").isidentifier()
    is_number = isinstance(value, str) and re.fullmatch(r"[0-9.]{1,6}", value)  # as variables have them
    return str(value) if is_plain or is_name or is_number else f"({value_digest(value)[:8]})"


@cache
def _ignored_fields(owner: str) -> frozenset[str]:
    return frozenset(name for names in IGNORED.get(owner, {}).values() for name in names.split())


@cache
def _ignored_variables() -> frozenset[str]:
    return frozenset(name for names in IGNORED_VARIABLES.values() for name in names.split())

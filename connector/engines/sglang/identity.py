"""Which of SGLang's options belong to a namespace: all that are not at their defaults, but for those in ``UNCOUNTED``.

An option that nobody has thought about counts: the price is a cold cache, never a wrong token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from sglang.srt.arg_groups.overrides import resolution_result

from ....tiers.errors import ConfigError
from ...identity.model_files import files_digest, value_digest

#: Why options cannot change the meaning of a page -> patterns of their names.
UNCOUNTED: Mapping[str, str] = {
    "names the model, whose weights count": "model_path served_model_name revision download_dir trust_remote_code",
    "a field of the namespace": "tp_size pp_size dcp_size attn_cp_size page_size",
    "where the server is, and what it serves": (
        "host port .*_port .*_ip .*_addr .*_url .*_urls .*_endpoint .*_endpoints fastapi_.* .*http.* grpc_.* smg_.* "
        "sidecar.* ssl_.* enable_ssl_refresh api_key admin_api_key .*warmup.* enable_response_store file_storage_path "
        "chat_template trust_request_chat_template hf_chat_template_name completion_template tokenizer_.* "
        "skip_tokenizer_init detokenizer_.* reasoning_parser tool_call_parser default_chat_.* strip_thinking_cache "
        "enable_strict_thinking tool_server enable_cache_report return_.* enable_return_.* stream.* "
        "incremental_streaming_output enable_streaming_session constrained_json_.* .*tokenize.* batch_notify_size "
        "sampling_.* preferred_sampling_params allow_auto_truncate asr_.* allowed_media_domains media_url_.* "
        "grammar_backend enable_custom_logit_processor .*watermark.* disable_outlines_disk_cache is_embedding"
    ),
    "what is logged and measured": (
        "log_.* .*_log_.* uvicorn_.* crash_dump_folder show_time_cost .*metric.* bucket_.* .*_buckets decode_log_.* "
        "gc_.* load_snapshot_.* load_publish_.* kv_events_config enable_trace trace_.* otlp_.* enable_mfu_.* "
        "stat_loggers .*nvtx.* enable_request_time_stats_logging"
    ),
    "when something is computed, not what": (
        "mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size "
        "max_prefill_tokens prefill_max_requests prefill_decode_.* .*prefill_delayer.* .*schedul.* .*priorit.* "
        "retraction_policy max_mamba_cache_size mamba_full_memory_ratio num_continuous_decode_steps enable_mixed_chunk "
        "min_free_slots_delay disable_overlap_schedule .*cuda_graph.* .*cudagraph.* .*two_batch.* .*single_batch.* "
        "tbo_.* .*memory_saver offload_.* cpu_offload_gb watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray "
        "custom_sigquit_handler numa_node base_gpu_id gpu_id_step random_seed .*_timeout load_balance_method nnodes "
        "node_rank dp_size attn_dp_size pp_max_micro_batch_size pp_async_batch_depth enable_dp_attention_local_.* "
        "enable_p2p_check pre_warm_nccl disaggregation_.* num_reserved_decode_tokens enable_pd.* optimistic_.* "
        "encoder_.* weight_loader_.* remote_instance_.* max_loaded_loras max_loras_.* lora_eviction_policy "
        "enable_lora_overlap_loading lora_drain_.* .*_worker_num mm_preprocess_cache_size_mb limit_mm_.* "
        "enable_broadcast_mm_inputs_process spec_trace_dir"
    ),
    "how pages are cached": (
        ".*radix_.* hicache_.* enable_hierarchical_cache enable_session_radix_cache .*swa_full_tokens_ratio.*"
    ),
    "counted by its content": "lora_paths",
}
_UNCOUNTED = re.compile("|".join(name for names in UNCOUNTED.values() for name in names.split()))
#: Variables that do not count: places, logs, and numbers of a process.
_UNCOUNTED_VARIABLES = re.compile(
    r"SGLANG_(.*(LOG|HICACHE|TIMEOUT|METRIC|TRACE|PROFIL|PORT|HOST_IP|TEST_).*|RUN_ID|.*_RANK)"
)


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
        if name.startswith("SGLANG_") and not _UNCOUNTED_VARIABLES.fullmatch(name)
    }
    names = {field.name for field in msgspec.structs.fields(type(server_args))}
    for name in ignore:
        if name not in names and not name.startswith("SGLANG_"):
            raise ConfigError(f"{name} is not an option of SGLang", field="identity.ignore")
    return {name: _shown(value) for name, value in sorted(found.items()) if name not in ignore}


def _options(server_args: Any) -> Iterator[tuple[str, Any]]:
    for each in msgspec.structs.fields(type(server_args)):
        if _UNCOUNTED.fullmatch(each.name):
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

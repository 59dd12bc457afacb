"""Everything that kvtiers uses of vLLM, as one table, and the check that the installed vLLM has all of it.

The check runs before any other module of ``connector.vllm`` is imported. If vLLM renamed or removed something, or
changed a signature, the engine refuses to start, and the error names the change. A release that kvtiers was not tested
with starts if nothing in the table changed.

The table has three parts:

- ``IMPLEMENTED``: methods of vLLM's base classes that kvtiers overrides and vLLM calls. vLLM's method must have the
  same parameters, with the same names, in the same order. A parameter written ``success=`` may be missing. One more
  parameter, or a new abstract method in the base class, is a change.
- ``CALLED``: functions that kvtiers calls, with the arguments it passes. vLLM may have more parameters if they have
  defaults. ``_`` stands for any name.
- ``READ``: attributes that kvtiers reads. An empty text means that only the class itself is used.

``>=0.31`` after an entry: releases before 0.31 do not have it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from connector.vllm.versions import TESTED, VERSION, release
from tiers.errors import ConfigError
from tiers.plain_logs import get_logger

logger = get_logger(__name__)

SHOWN_MAX = 10  # changes that an error lists

_BASE = "vllm.v1.kv_offload.base:"
_OFFLOAD_CONFIG = "vllm.v1.kv_offload.config:"
_TIERING = "vllm.v1.kv_offload.tiering.base:"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1."
_CACHES = "vllm.v1.kv_cache_interface:"
_STEP = "vllm.v1.core.sched.output:"

IMPLEMENTED: Mapping[str, tuple[str, ...]] = {
    f"{_BASE}OffloadingManager": (
        "lookup(key, req_context)",
        "get_load_source(key, req_context) >=0.32",
        "prepare_load(keys, req_context)",
        "complete_load(keys, req_context)",
        "prepare_store(keys, req_context)",
        "complete_store(keys, req_context, success=)",
        "touch(keys, req_context)",
        "on_new_request(req_context)",
        "on_request_finished(req_context)",
        "on_schedule_end(context)",
        "has_pending_work()",
        "take_events()",
        "reset_cache()",
        "on_reset_flushed() >=0.33",
        "get_stats()",
        "shutdown()",
    ),
    f"{_BASE}OffloadingSpec": (
        "__init__(config)",
        "build_metric_definitions(extra_config)",
        "get_manager()",
        "get_worker(kv_caches)",
    ),
    f"{_BASE}OffloadingWorker": (
        "submit_store(job_id, src_spec, dst_spec)",
        "submit_load(job_id, src_spec, dst_spec, expedited=)",
        "get_finished()",
        "wait(job_ids)",
        "shutdown()",
    ),
    f"{_TIERING}SecondaryTierManager": (
        "__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector=)",
        "build_metric_definitions(extra_config)",
        "lookup(key, req_context)",
        "submit_store(job_metadata)",
        "submit_load(job_metadata)",
        "get_finished_jobs()",
        "has_pending_work()",
        "take_events()",
        "touch(keys, req_context)",
        "on_new_request(req_context)",
        "on_request_finished(req_context)",
        "on_schedule_end(context)",
        "drain_jobs()",
        "get_stats()",
        "shutdown()",
    ),
    f"{_CONNECTOR}offloading_connector:OffloadingConnector": (
        "__init__(vllm_config, role, kv_cache_config)",
        "build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
        "register_kv_caches(kv_caches)",
        "on_new_request(request)",
        "get_num_new_matched_tokens(request, num_computed_tokens)",
        "build_connector_meta(scheduler_output)",
    ),
    f"{_CONNECTOR}base:KVConnectorBase_V1": (
        "__init__(vllm_config, role, kv_cache_config)",
        "build_kv_connector_stats(data=)",
        "build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
        "get_kv_connector_stats()",
        "get_num_new_matched_tokens(request, num_computed_tokens)",
        "update_state_after_alloc(request, blocks, num_external_tokens)",
        "update_connector_output(connector_output)",
        "build_connector_meta(scheduler_output)",
        "request_finished(request, block_ids)",
        "reset_cache()",
        "register_kv_caches(kv_caches)",
        "start_load_kv(forward_context, **kwargs)",
        "wait_for_layer_load(layer_name)",
        "get_finished(finished_req_ids)",
        "get_block_ids_with_load_errors()",
        "save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)",
        "wait_for_save()",
        "shutdown()",
    ),
    f"{_CONNECTOR}metrics:KVConnectorStats": (
        "__init__(data=)",
        "aggregate(other)",
        "is_empty()",
        "reduce()",
        "reset()",
    ),
    f"{_CONNECTOR}metrics:KVConnectorPromMetrics": (
        "__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
        "observe(transfer_stats_data, engine_idx=)",
    ),
}

CALLED: Mapping[str, tuple[str, ...]] = {
    f"{_BASE}OffloadingCounterMetadata": ("__init__(documentation, labelnames)",),
    f"{_BASE}OffloadingEvent": ("__init__(*, keys, medium, removed, locality)",),
    f"{_BASE}OffloadingGaugeMetadata": ("__init__(documentation, labelnames)",),
    f"{_BASE}PrepareStoreOutput": ("__init__(*, keys_to_store, store_spec, evicted_keys)",),
    f"{_BASE}ReqContext": ("get_offload_key_position(key) >=0.31",),
    f"{_BASE}RequestOffloadingContext": ("__init__()",),
    f"{_BASE}TierFilter": ("allows(medium, locality)",),
    f"{_BASE}TransferResult": ("__init__(job_id, success, transfer_size, transfer_time)",),
    "vllm.v1.kv_offload.cpu.common:CPULoadStoreSpec": ("__init__(block_ids)",),
    "vllm.v1.kv_offload.file_mapper:FileMapper": ("from_offloading_spec(_, _, _, _)", "get_run_config()"),
    f"{_TIERING}JobResult": ("__init__(*, job_id, success, successful_keys, transfer_time)",),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": ("register_connector(_, _, _)",),
    "vllm.distributed.kv_transfer.kv_transfer_state": ("get_kv_transfer_group()", "has_kv_transfer_group()"),
    f"{_CONNECTOR}base:KVConnectorBase_V1": ("_get_connector_metadata()",),
    f"{_CONNECTOR}offloading.config": ("build_offloading_config(vllm_config, kv_cache_config)",),
    f"{_CONNECTOR}offloading.metrics:OffloadingConnectorStats": (
        "__init__()",
        "increase_counter(_, _, _)",
        "is_empty()",
        "set_gauge(_, _, _)",
    ),
    "vllm.config:ModelConfig": ("get_head_size()",),
    "vllm.platforms.interface:Platform": (
        "get_device_capability()",
        "get_device_name()",
        "is_cpu()",
        "is_cuda()",
        "is_rocm()",
    ),
}

READ: Mapping[str, str] = {
    f"{_BASE}CanonicalKVCacheRef": "page_size_bytes tensor_idx",
    f"{_BASE}CanonicalKVCacheTensor": "page_size_bytes tensor",
    f"{_BASE}CanonicalKVCaches": "group_data_refs tensors",
    f"{_BASE}GPULoadStoreSpec": "block_ids block_indices group_sizes",
    f"{_BASE}Locality": "LOCAL REMOTE",
    f"{_BASE}LookupResult": "HIT HIT_PENDING MISS RETRY",
    f"{_BASE}Medium": "CPU STORAGE",
    f"{_BASE}OffloadingMetricMetadata": "",
    f"{_BASE}OffloadingSpec": "blocks_per_chunk config",
    f"{_BASE}ReqContext": "load_tier_filter req_id",
    "vllm.v1.kv_offload.cpu.common:CPULoadStoreSpec": "block_ids",
    f"{_OFFLOAD_CONFIG}OffloadingConfig": (
        "cache canonical_layout enable_kv_cache_events engine_id extra_config groups kv_cache_layout>=0.29 model "
        "parallel replicated_layout worker_kv_bytes_per_block"
    ),
    f"{_OFFLOAD_CONFIG}OffloadingCacheConfig": "blocks_per_chunk tokens_per_hash",
    f"{_OFFLOAD_CONFIG}OffloadingGroupConfig": (
        "group_id>=0.30 layer_names sliding_window_size_in_chunks>=0.33 tokens_per_block"
    ),
    f"{_OFFLOAD_CONFIG}OffloadingModelConfig": "dtype name",
    f"{_OFFLOAD_CONFIG}OffloadingParallelConfig": (
        "dcp_size is_parallelism_agnostic pcp_size pp_size rank tp_size world_size"
    ),
    "vllm.v1.kv_offload.file_mapper:FileMapper": "base_path rank",
    f"{_TIERING}JobResult": "transfer_bytes>=0.31",
    f"{_TIERING}SecondaryTierManager": "medium tier_type",
    f"{_TIERING}TieringOffloadingMetrics": (
        "CASCADE_JOB_FAILURES CHUNK_HITS>=0.30 CHUNK_QUERIES>=0.30 PROMOTION_JOB_FAILURES READ_BYTES READ_TIME "
        "WRITE_BYTES WRITE_TIME"
    ),
    f"{_TIERING}TransferJob": "chunk_ids>=0.30 job_id keys req_context",
    "vllm.v1.kv_offload.tiering.spec:TieringOffloadingSpec": "secondary_tier_configs",
    f"{_CONNECTOR}offloading.scheduler:OffloadingConnectorScheduler": "manager",
    f"{_CONNECTOR}offloading_connector:OffloadingConnector": "connector_scheduler",
    f"{_CONNECTOR}base:KVConnectorMetadata": "",
    f"{_CONNECTOR}base:KVConnectorRole": "SCHEDULER WORKER",
    f"{_CONNECTOR}metrics:KVConnectorStats": "data",
    f"{_CONNECTOR}multi_connector:MultiConnector": "_connectors",
    f"{_CACHES}ChunkedLocalAttentionSpec": "",
    f"{_CACHES}FullAttentionSpec": "block_size dtype head_size non_causal page_size_bytes",
    f"{_CACHES}KVCacheConfig": "kv_cache_groups num_blocks",
    f"{_CACHES}KVCacheGroupSpec": "kv_cache_spec layer_names",
    f"{_CACHES}MLAAttentionSpec": "block_size dtype head_size page_size_bytes",
    f"{_CACHES}MambaSpec": "",
    f"{_CACHES}RSWASpec": "",
    f"{_CACHES}SlidingWindowSpec": "",
    f"{_CACHES}UniformTypeKVCacheSpecs": "kv_cache_specs",
    _CACHES.removesuffix(":"): "create_kv_cache_views>=0.29",
    f"{_STEP}CachedRequestData": "new_block_ids num_computed_tokens req_ids resumed_req_ids",
    f"{_STEP}NewRequestData": "block_ids num_computed_tokens req_id",
    f"{_STEP}SchedulerOutput": (
        "has_sync_kv_loads>=0.29 num_scheduled_tokens scheduled_cached_reqs scheduled_new_reqs"
    ),
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": "DISK>=0.32 EXTERNAL_UNSPECIFIED>=0.32 HOST>=0.32",
    "vllm.v1.outputs:KVConnectorOutput": "finished_recving invalid_block_ids",
    "vllm.v1.request:Request": (
        "cache_salt kv_transfer_params lora_request mm_features prompt_embeds prompt_token_ids request_id resumable "
        "skip_reading_prefix_cache"
    ),
    # Read by weights.py and translate.py. identity.py needs no names: every other field counts, whatever it is called.
    "vllm.config:AttentionConfig": (
        "backend backend_per_kind flash_attn_version indexer_kv_dtype use_non_causal use_trtllm_attention"
    ),
    "vllm.config:CacheConfig": (
        "cache_dtype enable_prefix_caching kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype "
        "prefix_caching_hash_algo replayssm_buffer_len use_replayssm"
    ),
    "vllm.config:KVTransferConfig": "kv_connector_extra_config kv_load_failure_policy kv_role",
    "vllm.config:LoRAConfig": "target_modules",
    "vllm.config:LoadConfig": "download_dir load_format model_loader_extra_config",
    "vllm.config:MambaConfig": "backend",
    "vllm.config:ModelConfig": (
        "dtype hf_config hf_config_path hf_overrides hf_text_config is_attention_free is_hybrid "
        "is_prefix_caching_supported max_model_len model model_class_overrides model_weights multimodal_config "
        "original_max_model_len override_generation_config pooler_config quantization quantization_config revision "
        "try_get_generation_config"
    ),
    "vllm.config:MultiModalConfig": (
        "enable_mm_embeds language_model_only mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_processor_cache_gb "
        "mm_processor_kwargs video_pruning_method video_pruning_rate"
    ),
    "vllm.config:ParallelConfig": (
        "cp_kv_cache_interleave_size distributed_executor_backend nnodes_within_dp pipeline_parallel_size "
        "placement_group world_size"
    ),
    "vllm.config:PoolerConfig": "seq_pooling_type tok_pooling_type",
    "vllm.config:SpeculativeConfig": (
        "attention_backend draft_load_config draft_model_config kv_cache_dtype method num_speculative_tokens"
    ),
    "vllm.config:VllmConfig": (
        "attention_config cache_config kv_transfer_config load_config lora_config mamba_config max_concurrent_batches "
        "model_config parallel_config speculative_config weight_transfer_config"
    ),
    "vllm.lora.request:LoRARequest": "lora_int_id lora_name lora_path",
    "vllm.platforms": "current_platform",
    "vllm.platforms.interface:Platform": "device_name device_type ray_device_key",
}


def check_contract(version: str = VERSION) -> None:
    """Refuse a vLLM that lacks something kvtiers uses. Say so where the release was not tested with kvtiers.

    Raises:
        ConfigError: lists what is missing or changed.
    """
    installed = release(version)
    is_tested = installed is not None and "{}.{}".format(*installed) in TESTED
    tested = f"{TESTED[0]} to {TESTED[-1]}"
    found = list(dict.fromkeys(changes(installed if is_tested else None)))
    if found:
        more = f"; and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        raise ConfigError(
            f"version {version!r} lacks what kvtiers uses of vLLM: {'; '.join(found[:SHOWN_MAX])}{more}. Install a "
            f"release that kvtiers was tested with ({tested}), or a newer kvtiers",
            field="vllm",
        )
    if not is_tested:
        logger.warning(
            "vLLM %s was not tested with kvtiers (%s were). It has everything that kvtiers uses, so the engine starts. "
            "Blocks that other releases stored are not read",
            version,
            tested,
        )


def changes(installed: tuple[int, int] | None) -> Iterator[str]:
    """Each difference between the installed vLLM and the table, as one sentence.

    Args:
        installed: the release. None: not a tested one, so it must have every entry.
    """
    for place, texts in IMPLEMENTED.items():
        yield from _changes_at(place, texts, installed, _changed_method)
        owner, _ = _find(place)
        known = {_Entry.of(text).name for text in texts}
        for name in sorted(getattr(owner, "__abstractmethods__", frozenset()) - known):
            yield f"{owner.__name__}.{name} is new and abstract"
    for place, texts in CALLED.items():
        yield from _changes_at(place, texts, installed, _changed_function)
    for place, names in READ.items():
        yield from _changes_at(place, names.split(), installed, _gone_attribute)


def _changes_at(
    place: str,
    texts: Sequence[str],
    installed: tuple[int, int] | None,
    changes_of: Callable[[Any, _Entry], Iterator[str]],
) -> Iterator[str]:
    entries = [entry for text in texts if (entry := _Entry.of(text)).is_in(installed)]
    if texts and not entries:
        return
    owner, problem = _find(place)
    if problem:
        yield problem
        return
    for entry in entries:
        yield from changes_of(owner, entry)


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """``name(parameters) >=release``, read."""

    name: str
    parameters: tuple[inspect.Parameter, ...] = ()
    since: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, text: str) -> _Entry:
        text, _, since = text.partition(">=")
        name, _, inside = text.strip().removesuffix(")").partition("(")
        parameters = tuple(_parameters(inside.split(", "))) if inside else ()
        return cls(name, parameters, release(since) or (0, 0))

    def is_in(self, installed: tuple[int, int] | None) -> bool:
        return installed is None or installed >= self.since


def _parameters(texts: Iterable[str]) -> Iterator[inspect.Parameter]:
    is_keyword_only = False
    for index, text in enumerate(texts):
        if text == "*":
            is_keyword_only = True
        elif text.startswith("**"):
            yield inspect.Parameter(text[2:], inspect.Parameter.VAR_KEYWORD)
        else:
            default = None if text.endswith("=") else inspect.Parameter.empty
            name = text.removesuffix("=")
            kind = inspect.Parameter.KEYWORD_ONLY if is_keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
            yield inspect.Parameter(f"_{index}" if name == "_" else name, kind, default=default)


def _find(place: str) -> tuple[Any, str]:
    """The module or class of a place and "", or None and why it cannot be found."""
    module_name, _, name = place.partition(":")
    try:
        module = import_module(module_name)
    except ImportError as e:
        return None, f"{module_name} cannot be imported ({e})"
    if not name:
        return module, ""
    return (getattr(module, name), "") if hasattr(module, name) else (None, f"{module_name}.{name} is gone")


def _gone_attribute(owner: Any, entry: _Entry) -> Iterator[str]:
    # hasattr: a module may create an attribute on first use, as vllm.platforms does.
    if entry.name not in _attributes(owner) and not hasattr(owner, entry.name):
        yield f"{owner.__name__}.{entry.name} is gone"


def _changed_method(owner: Any, entry: _Entry) -> Iterator[str]:
    return _changed(owner, entry, _is_called_with)


def _changed_function(owner: Any, entry: _Entry) -> Iterator[str]:
    return _changed(owner, entry, _takes)


def _changed(
    owner: Any, entry: _Entry, fits: Callable[[list[inspect.Parameter], Sequence[inspect.Parameter]], bool]
) -> Iterator[str]:
    is_constructor = entry.name == "__init__"
    name = owner.__name__ if is_constructor else f"{owner.__name__}.{entry.name}"
    found = owner if is_constructor else getattr(owner, entry.name, None)
    if found is None:
        yield f"{name} is gone"
        return
    if not callable(found):
        yield f"{name} is not a function"
        return
    theirs = list(inspect.signature(found).parameters.values())
    is_bound = isinstance(inspect.getattr_static(owner, entry.name), classmethod | staticmethod)
    if isinstance(owner, type) and not is_constructor and not is_bound:
        theirs = theirs[1:]  # self
    if not fits(theirs, entry.parameters):
        shown, known = (", ".join(map(_shown, each)) for each in (theirs, entry.parameters))
        yield f"{name} takes ({shown}), and kvtiers expects ({known})"


def _takes(theirs: list[inspect.Parameter], ours: Sequence[inspect.Parameter]) -> bool:
    """Whether a function accepts the arguments that kvtiers passes, and requires no others."""
    left = {each.name: each for each in theirs}
    for place, argument in enumerate(ours):
        name = argument.name
        if argument.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            if place >= len(theirs) or theirs[place].kind is inspect.Parameter.KEYWORD_ONLY:
                return False
            if name.startswith("_"):
                name = theirs[place].name
            elif name != theirs[place].name:
                return False
        if left.pop(name, None) is None:
            return False
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(each.default is not inspect.Parameter.empty or each.kind in variable for each in left.values())


def _is_called_with(theirs: list[inspect.Parameter], ours: Sequence[inspect.Parameter]) -> bool:
    """Whether kvtiers' method can be called by vLLM's signature: the names and their order are the same."""
    names = [each.name for each in theirs]
    optional = {each.name for each in ours if each.default is not inspect.Parameter.empty}
    return names == [each.name for each in ours if each.name in names or each.name not in optional]


def _shown(parameter: inspect.Parameter) -> str:
    name = "_" if parameter.name.startswith("_") else parameter.name
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{name}"
    return name if parameter.default is inspect.Parameter.empty else f"{name}="


def _attributes(owner: Any) -> set[str]:
    """Attribute names of a module or class, including those that a class's constructor assigns."""
    names = set(dir(owner))
    for cls in getattr(owner, "__mro__", ()):
        names.update(vars(cls).get("__annotations__", ()))
        for maker in ("__init__", "__post_init__"):
            code = getattr(inspect.unwrap(vars(cls).get(maker, object.__init__)), "__code__", None)
            names.update(getattr(code, "co_names", ()))
    return names

"""Lists everything that kvtiers uses of vLLM, and checks that the installed vLLM has it.

The check runs before any other module of ``connector.vllm`` is imported. If vLLM renamed or removed something, or
changed a signature, the engine refuses to start, and the error names the change. A release that kvtiers was not tested
with starts if nothing changed.

- ``CALLED``: functions that kvtiers calls, with the arguments it passes. vLLM may have more parameters if they have
  defaults. ``_`` stands for any name.
- ``READ``: attributes that kvtiers reads. An empty text means that only the class itself is used.
- ``implements``: the methods that vLLM calls need no table. Each class that inherits from one of vLLM's is compared
  with it when its module is imported.

``>=0.31`` after an entry: releases before 0.31 do not have it.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, TypeVar

from ...tiers.errors import ConfigError
from ...tiers.plain_logs import get_logger
from .versions import TESTED, VERSION, release

logger = get_logger(__name__)

SHOWN_MAX = 10  # changes that an error lists

_BASE = "vllm.v1.kv_offload.base:"
_OFFLOAD_CONFIG = "vllm.v1.kv_offload.config:"
_TIERING = "vllm.v1.kv_offload.tiering.base:"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1."
_CACHES = "vllm.v1.kv_cache_interface:"
_STEP = "vllm.v1.core.sched.output:"

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
    "vllm.config:ModelConfig": ("get_head_size()", "using_transformers_backend()"),
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
    f"{_BASE}OffloadingManager": "",
    f"{_BASE}OffloadingMetricMetadata": "",
    f"{_BASE}OffloadingSpec": "blocks_per_chunk config",
    f"{_BASE}OffloadingWorker": "",
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
    f"{_CONNECTOR}base:KVConnectorBase_V1": "_kv_transfer_config",
    f"{_CONNECTOR}base:KVConnectorMetadata": "",
    f"{_CONNECTOR}base:KVConnectorRole": "SCHEDULER",
    f"{_CONNECTOR}metrics:KVConnectorPromMetrics": "",
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
    "vllm.config:CacheConfig": "enable_prefix_caching prefix_caching_hash_algo",
    "vllm.config:KVTransferConfig": "kv_connector_extra_config kv_load_failure_policy kv_role",
    "vllm.config:LoadConfig": "download_dir load_format model_loader_extra_config",
    "vllm.config:ModelConfig": (
        "attn_type dtype hf_config hf_config_path hf_overrides hf_text_config is_prefix_caching_supported "
        "max_model_len model model_weights multimodal_config original_max_model_len override_generation_config "
        "pooler_config quantization revision try_get_generation_config"
    ),
    "vllm.config:MultiModalConfig": (
        "enable_mm_embeds language_model_only mm_encoder_fp8_scale_path mm_processor_cache_gb"
    ),
    "vllm.config:ParallelConfig": "distributed_executor_backend nnodes_within_dp placement_group world_size",
    "vllm.config:PoolerConfig": "seq_pooling_type tok_pooling_type",
    "vllm.config:SpeculativeConfig": "draft_load_config draft_model_config",
    "vllm.config:VllmConfig": (
        "cache_config kv_transfer_config load_config lora_config model_config parallel_config speculative_config "
        "weight_transfer_config"
    ),
    "vllm.lora.request:LoRARequest": "lora_int_id lora_name lora_path",
    "vllm.platforms": "current_platform",
    "vllm.platforms.interface:Platform": "device_name device_type ray_device_key",
}


#: Method -> first release of vLLM that calls it.
SINCE: Mapping[str, tuple[int, int]] = {"get_load_source": (0, 32), "on_reset_flushed": (0, 33)}

#: Public methods that only kvtiers calls, in classes that inherit from vLLM's.
OWN = frozenset({"continue_wait", "note_asked"})

_C = TypeVar("_C", bound=type)


def check_contract(version: str = VERSION) -> None:
    """Refuse a vLLM that lacks something kvtiers uses. Log a warning for a release not tested with kvtiers.

    Raises:
        ConfigError: lists what is missing or changed.
    """
    _refuse(changes(_tested(version)), version)
    if _tested(version) is None:
        logger.warning(
            "vLLM %s was not tested with kvtiers (%s to %s were). It has everything that kvtiers uses, so the engine "
            "starts. It does not read blocks that other releases stored",
            version,
            TESTED[0],
            TESTED[-1],
        )


def implements(cls: _C) -> _C:
    """Decorator: compare a class with the vLLM classes that it inherits from.

    vLLM calls every public method except ``OWN``. So vLLM's class must have the method, with the same parameter names
    in the same order. Only parameters that have a default in kvtiers may be missing in vLLM.

    Raises:
        ConfigError: lists what changed.
    """
    _refuse(changed_methods(cls, _tested(VERSION)), VERSION)
    return cls


def _tested(version: str) -> tuple[int, int] | None:
    """The release; None for an untested release, which must have everything."""
    installed = release(version)
    return installed if installed is not None and "{}.{}".format(*installed) in TESTED else None


def _refuse(changed: Iterator[str], version: str) -> None:
    if found := list(dict.fromkeys(changed)):
        more = f"; and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        raise ConfigError(
            f"version {version!r} lacks what kvtiers uses of vLLM: {'; '.join(found[:SHOWN_MAX])}{more}. Install a "
            f"release that kvtiers was tested with ({TESTED[0]} to {TESTED[-1]}), or a newer kvtiers",
            field="vllm",
        )


def changed_methods(cls: type, installed: tuple[int, int] | None) -> Iterator[str]:
    """Each difference between a class' methods and those of its vLLM base classes, as one sentence."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("vllm.")]
    for name in sorted(getattr(cls, "__abstractmethods__", ())):
        yield f"{bases[0].__name__}.{name} is new and abstract"
    for name, ours in vars(cls).items():
        is_private = name.startswith("_") and name != "__init__"
        if is_private or name in OWN or not isinstance(ours, FunctionType | classmethod):
            continue
        base = next((base for base in bases if name in vars(base)), None)
        if base is None or (theirs := _parameters(base, name)) is None:
            if name != "__init__" and (installed is None or installed >= SINCE.get(name, installed)):
                yield f"{bases[0].__name__}.{name} is gone"
            continue
        known = _parameters(cls, name) or []
        optional = {each.name for each in known if each.default is not inspect.Parameter.empty}
        names = [each.name for each in theirs]
        if names != [each.name for each in known if each.name in names or each.name not in optional]:
            yield _takes(base, name, theirs, ", ".join(map(_shown, known)))


def changes(installed: tuple[int, int] | None) -> Iterator[str]:
    """Each difference between the installed vLLM and the tables, as one sentence.

    Args:
        installed: the release. None: an untested release, which must have every entry.
    """
    tables = ((CALLED, _changed_function), (READ, _gone_attribute))
    for table, changes_of in tables:
        for place, names in table.items():
            entries = [
                name
                for name, _, since in (text.partition(">=") for text in entries_of(names))
                if not since or installed is None or installed >= (release(since) or installed)
            ]
            if names and not entries:
                continue
            owner, problem = _find(place)
            if problem:
                yield problem
                continue
            for entry in entries:
                yield from changes_of(owner, entry)


def entries_of(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """The entries of one place in a table."""
    return tuple(names.split()) if isinstance(names, str) else names


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


def _gone_attribute(owner: Any, name: str) -> Iterator[str]:
    # hasattr: a module may create an attribute on first use, as vllm.platforms does.
    if name not in _attributes(owner) and not hasattr(owner, name):
        yield f"{owner.__name__}.{name} is gone"


def _changed_function(owner: Any, text: str) -> Iterator[str]:
    """Report a function that rejects the arguments that kvtiers passes, or requires others."""
    name, _, arguments = text.strip().removesuffix(")").partition("(")
    parameters = _parameters(owner, name)
    if parameters is None:
        yield f"{owner.__name__}.{name} is gone"
        return
    by_place, _, by_name = arguments.partition("*, ")
    passed = [argument for argument in by_place.split(", ") if argument]
    try:
        bound = inspect.Signature(parameters).bind(*passed, **{each: each for each in by_name.split(", ") if each})
    except TypeError:
        fits = False
    else:  # each argument is its own name
        fits = all(argument in ("_", parameter) for parameter, argument in bound.arguments.items())
    if not fits:
        yield _takes(owner, name, parameters, arguments)


def _parameters(owner: Any, name: str) -> list[inspect.Parameter] | None:
    """A function's parameters without ``self``; None if the function does not exist."""
    function = owner if name == "__init__" else getattr(owner, name, None)
    if not callable(function):
        return None
    parameters = list(inspect.signature(function).parameters.values())
    is_bound = name == "__init__" or isinstance(inspect.getattr_static(owner, name), classmethod | staticmethod)
    return parameters[1:] if isinstance(owner, type) and not is_bound else parameters


def _takes(owner: Any, name: str, theirs: list[inspect.Parameter], known: str) -> str:
    full_name = owner.__name__ if name == "__init__" else f"{owner.__name__}.{name}"
    return f"{full_name} takes ({', '.join(map(_shown, theirs))}), and kvtiers expects ({known})"


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    return parameter.name if parameter.default is inspect.Parameter.empty else f"{parameter.name}="


def _attributes(owner: Any) -> set[str]:
    """Attribute names of a module or class, including those that a class's constructor assigns."""
    names = set(dir(owner))
    for cls in getattr(owner, "__mro__", ()):
        names.update(vars(cls).get("__annotations__", ()))
        for maker in ("__init__", "__post_init__"):
            code = getattr(inspect.unwrap(vars(cls).get(maker, object.__init__)), "__code__", None)
            names.update(_stored(code) if code is not None else ())
    return names


def _stored(code: CodeType) -> Iterator[str]:
    """Attributes that a method assigns to its object, not those that it reads or assigns to another object."""
    own = code.co_varnames[0]
    for before, each in pairwise(dis.get_instructions(code)):
        loaded = before.argval[-1:] if isinstance(before.argval, tuple) else (before.argval,)  # 3.13 loads two at once
        if each.opname == "STORE_ATTR" and own in loaded:
            yield each.argval

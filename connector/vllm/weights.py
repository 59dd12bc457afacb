"""Identifies an engine's weights: with the model's name and the options in ``identity``, they decide a token's KV.

Weights are identified by their commit, or else by the content of their folder. The result must be the same in the
scheduler, in every worker and on every host with the same files. So if there are files, vLLM's ``hf_config`` is not
used: only workers load the model, and loading changes ``hf_config``. Without files, the scheduler's ``hf_config`` is
used.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from ...tiers.errors import ConfigError
from ...tiers.plain_logs import get_logger
from ..identity.model_files import DIGEST_HEX_DIGITS, files_digest, hub_commit, hub_folder, value_digest
from . import prefix_only

logger = get_logger(__name__)

_OF_SCHEDULER = re.compile(rf"(config|engine):[0-9a-f]{{{DIGEST_HEX_DIGITS}}}(?=\+|$)")  # a commit has 40 digits

#: Values of ``--load-format`` that read the model's own files, which a commit or digest identifies.
_OWN_FILES = frozenset(
    {"auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "ipc_cache", "mistral", "modelexpress"}
    | {"npcache", "pt", "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state"}
)
#: Fields of ``--model-loader-extra-config`` that say where weights are. The other fields tune speed or hold secrets.
_LOCATION = re.compile(r"(.*_)?(uri|url|dir|path|pattern|endpoint)")

#: Environment variables that change the KV. ``identity`` has the scheduler's; a worker on another host may differ.
_COMPUTING_VARIABLES = (
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
)

_LLAMA4_TUNED_ABOVE_TOKENS = 32_768


def kv_revision(vllm_config: Any) -> str | None:
    """Return a text that identifies the weights, and everything else but options that changes the KV.

    None: the weights are unknown.

    Args:
        vllm_config: vLLM's VllmConfig, or an object with some of its fields.

    Raises:
        ConfigError: names the field that makes KV unusable:

            - ``weight_transfer_config``: the weights will change while the engine runs.
            - ``pooler_config``, ``model``, ``rope_type``: see ``prefix_only.check_model``.
            - ``mm_processor_cache_gb``: vLLM names images by a counter that starts anew in each process.
    """
    model = vllm_config.model_config
    cache = getattr(vllm_config, "cache_config", None)
    _refuse_counted_pictures(model, cache)
    prefix_only.check_model(model)
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "replaces the weights of a running engine, but KV is stored under the name of the weights at the start; "
            "leave it out, or run such engines without a KV connector",
            field="weight_transfer_config",
        )
    load = getattr(vllm_config, "load_config", None)
    parts = [weights_revision(model, load), *_by_length(model)]
    scales = getattr(getattr(model, "multimodal_config", None), "mm_encoder_fp8_scale_path", None)
    if scales:
        parts.append(f"mm_scales:{value_digest(files_digest(scales) or scales)}")
    variables = {name: os.environ[name] for name in _COMPUTING_VARIABLES if os.environ.get(name)}
    if variables:
        parts.append(f"variables:{value_digest(variables)}")
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != model.model:  # blocks also contain the KV of the draft model's layers
        revision = weights_revision(draft, getattr(speculative, "draft_load_config", None) or load)
        parts.append(f"draft:{value_digest([draft.model, revision])}")
    return "+".join(part for part in parts if part) or None


def _refuse_counted_pictures(model: Any, cache: Any) -> None:
    """Refuse an engine in which vLLM names images by a counter.

    vLLM names images by their content only if one of its own caches needs these names. Otherwise it uses a counter,
    which starts anew in each process, and block hashes include the counter.
    """
    multimodal: Any = getattr(model, "multimodal_config", None)
    if (
        getattr(multimodal, "mm_processor_cache_gb", None) == 0
        and not getattr(cache, "enable_prefix_caching", True)
        and not (multimodal.language_model_only and not multimodal.enable_mm_embeds)
    ):
        raise ConfigError(
            "is 0 and prefix caching is off: vLLM then names images, audio and videos by a counter, and KV of another "
            "image would be loaded; turn on one of the two, or give --language-model-only",
            field="mm_processor_cache_gb",
        )


def weights_revision(model: Any, load: Any = None) -> str | None:
    """Return a text that identifies the weights together with the model's name; None: the weights are unknown.

    It consists of:

    - the commit or revision, and the quantization;
    - digests of a local folder's weights and configs;
    - digests of ``hf_overrides``, and of the source of weights that are not in the model's files;
    - a digest of the final config, if neither a commit nor files are known, if the weights are in a bucket, or if a
      function overrides the config.

    Args:
        model: vLLM's ModelConfig.
        load: vLLM's LoadConfig.
    """
    hf_config = getattr(model, "hf_config", None)
    name, revision = str(getattr(model, "model", None) or ""), getattr(model, "revision", None)
    url = str(getattr(model, "model_weights", None) or "")
    # Weights in a bucket: the local folder has only the configs, and only on the host that pulled them.
    in_bucket = "://" in url
    config_path = getattr(model, "hf_config_path", None)
    commit = config_commit = getattr(hf_config, "_commit_hash", None)
    is_local = in_bucket or not name or os.path.exists(name)
    if not is_local and (config_path or not commit):
        # The config's commit is missing or belongs to another repository, so look up the weights' commit.
        commit = hub_commit(name, revision, getattr(load, "download_dir", None))
        if not (commit or revision):
            logger.warning(
                "which commit of %s is loaded is not known: KV of an older commit may be loaded after an update", name
            )
    places = (config_path,) if in_bucket else (name, url, config_path)
    files = [found for path in places if path and (found := files_digest(path))]
    if url and not os.path.exists(url):
        files.append(f"weights:{value_digest(url)}")
    overrides = getattr(model, "hf_overrides", None)
    parts = [commit or revision, getattr(model, "quantization", None), *files]
    if config_commit != commit and config_commit:
        parts.append(f"config:{config_commit}")
    if callable(overrides) or in_bucket or not (commit or config_commit or files):
        parts.append(config_digest(hf_config))
    if overrides and not callable(overrides):
        parts.append(f"overrides:{value_digest(overrides)}")
    parts += _loaded_from(load)
    return "+".join(str(part) for part in parts if part) or None


def _by_length(model: Any) -> list[str]:
    """Model settings that vLLM derives from ``max_model_len``. They change the KV of every prompt, even a short one."""
    config = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    length = getattr(model, "max_model_len", None)

    def exceeds(limit: int | None) -> str:
        # With -1 vLLM decides by one length, and later chooses another length that fits the memory.
        if getattr(model, "original_max_model_len", None) == -1:
            return "auto"
        return str(length if limit is None or length is None else length > limit)

    parts = set()
    for rope in prefix_only.rope_parameters(config):
        if "longrope" in (rope.get("rope_type"), rope.get("type")):
            name = "original_max_position_embeddings"
            parts.add(f"long:{exceeds(rope.get(name) or getattr(config, name, None))}")
    if str(getattr(config, "model_type", "")).startswith("llama4"):
        generation = {**model.try_get_generation_config(), **model.override_generation_config}
        parts.add(f"tuned:{generation.get('attn_temperature_tuning', exceeds(_LLAMA4_TUNED_ABOVE_TOKENS))}")
    return sorted(parts)


def _loaded_from(load: Any) -> list[str]:
    """The source of weights that are not in the model's files: random weights, tensorizer, or a plugin."""
    load_format = str(getattr(load, "load_format", "auto")).lower()
    parts = [] if load_format in _OWN_FILES else [f"load:{load_format}"]
    found = dict(_locations(getattr(load, "model_loader_extra_config", None)))
    return [*parts, f"from:{value_digest(found)}"] if found else parts


def _locations(extra: Any, within: str = "") -> Iterator[tuple[str, str]]:
    for name, value in extra.items() if isinstance(extra, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _locations(value, f"{within}{name}.")
        elif isinstance(value, str) and _LOCATION.fullmatch(name):
            yield f"{within}{name}", value


class Adapters:
    """Identifies LoRA adapters by the content of their files; requests give only a name and a path. Any thread.

    An engine loads an adapter at any time before the adapter's first request. If the files changed after the engine's
    start, it is unknown whether the engine uses the old or the new files.

    Attributes:
        started_ns: a time before the engine loaded its first adapter.
    """

    def __init__(self) -> None:
        self.started_ns = time.time_ns()
        self._seen: dict[tuple[int, str], str] = {}

    def revision(self, lora: LoRARequest) -> str | None:
        """Return the digest of an adapter's files, or the commit of an adapter from the hub. None: unknown.

        If the files change while the engine runs (between its start and the adapter's first request, or later), the
        result is None until the engine is restarted.

        Args:
            lora: the LoRA request of a request.
        """
        path = os.path.expanduser(lora.lora_path)
        found = files_digest(path, also="adapter_config.json") if os.path.exists(path) else hub_commit(path, None)
        if found is None:
            return None
        adapter = (lora.lora_int_id, path)
        is_known = adapter in self._seen or _changed_ns(path) <= self.started_ns
        if is_known and self._seen.setdefault(adapter, found) == found:
            return found
        if self._seen.get(adapter) != "":
            self._seen[adapter] = ""  # permanent, even if the old files are restored
            logger.warning(
                "the files of the adapter in %s were changed after the engine's start: its KV is neither stored nor "
                "loaded until the engine is started again",
                path,
            )
        return None


def _changed_ns(path: str) -> int:
    """When an adapter's files last changed; 0 for a hub adapter with only one commit in the local cache."""
    place = Path(path)
    if not place.exists():
        folder = hub_folder(path)
        ref, snapshots = folder / "refs" / "main", folder / "snapshots"
        places = [ref] if snapshots.exists() and len(list(snapshots.iterdir())) > 1 else []
    else:
        # A folder that was moved here contains old files, and a link may now point to another folder.
        places = [place, *place.iterdir()] if place.is_dir() else [place]
    times = [each.lstat().st_ctime_ns for each in places] + [
        each.stat().st_ctime_ns for each in places if each.exists()
    ]
    return max(times, default=0)


def config_digest(hf_config: Any) -> str | None:
    """Digest of a config; None if it has no ``to_dict``."""
    if not hasattr(hf_config, "to_dict"):
        return None
    fields = {name: value for name, value in hf_config.to_dict().items() if name != "transformers_version"}
    return f"config:{value_digest(fields)}"


def without_config(revision: str | None) -> str:
    """Remove the parts of a revision that may differ in workers: ``config_digest`` and ``identity_digest``."""
    return _OF_SCHEDULER.sub("", revision or "").strip("+")

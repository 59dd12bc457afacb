"""Rows for models whose layers are not all of full attention: tiny ones with random weights.

A prompt is stored by one engine's process and answered by the next one's. A second prompt shares its beginning, so that
a window or a state in the middle of what is stored is loaded, too.

The hybrid model has Mamba2 layers. In vLLM 0.32 their CPU kernels raise IndexError where prefix caching is on and a
step has more than one block, hence ``STEP_TOKENS``. Other states do not run on CPUs: Mamba1 (Jamba) lacks
``torch.ops._C.selective_scan_fwd``, and GDN (Qwen3-Next) takes bfloat16 only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtiers.connector.vllm_config import vllm_config
from tests.e2e.lab import EngineFailedError, Row
from tests.e2e.rows import BLOCK_TOKENS, Run, Setting
from tests.e2e.ways import on_cpu

VOCABULARY = 256
STEP_TOKENS = BLOCK_TOKENS  # of prefill
PROMPT_TOKENS = 404
SHARED_TOKENS = 172
KEPT_EVERY_TOKENS = 128  # a window or a state, besides those at a prompt's end
CHUNKS = (1, 4, 8)
_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,  # wide enough that the next token depends on the ones before
    "tie_word_embeddings": False,  # or Gemma repeats a prompt's last token
    "dtype": "float32",
}


@dataclass(frozen=True)
class Model:
    """A model of transformers.

    Attributes:
        name: begins the names of transformers' two classes.
        config: those of its options that are not in ``_SHAPE``.
    """

    name: str
    config: Mapping[str, Any]
    config_suffix: str = "Config"

    def made_in(self, folder: Path) -> Path:
        """Its folder, written if it is not there."""
        if not (folder / self.name / "config.json").exists():
            import torch
            import transformers

            torch.manual_seed(0)
            config = getattr(transformers, f"{self.name}{self.config_suffix}")(**{**_SHAPE, **self.config})
            getattr(transformers, f"{self.name}ForCausalLM")(config).save_pretrained(folder / self.name)
        return folder / self.name


GEMMA = Model(
    "Gemma3",
    {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32},
    "TextConfig",
)
MISTRAL = Model("Mistral", {"sliding_window": 64})
GRANITE = Model(
    "GraniteMoeHybrid",
    {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 8,  # a state is not larger than a block of KV
        "mamba_n_groups": 1,
        "mamba_chunk_size": STEP_TOKENS,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 128,
    },
)


def sliding_windows(setting: Setting, name: str) -> Row:
    """A model of windows, and one with full attention beside them: stored block by block, or refused."""
    row = Row(f"{name}: sliding windows", setting.lab.version)
    for model in (GEMMA, MISTRAL):
        asked = _Asked(setting, model, row)
        for chunk in CHUNKS:
            if chunk > 1 and not name.startswith("spec"):
                row.expect(
                    asked.is_refused(name, chunk, "set blocks_per_chunk: 1 for this model"),
                    f"{model.name}: blocks_per_chunk {chunk} is not refused",
                )
            else:
                asked.check_reuse(name, chunk)
    return row


def recurrent_states(setting: Setting, name: str) -> Row:
    """A hybrid of Mamba2 and attention: reused up to the last state that was stored."""
    row = Row(f"{name}: recurrent states", setting.lab.version)
    asked = _Asked(setting, GRANITE, row)
    for chunk in CHUNKS:
        if chunk > 1 and name.startswith("shared_storage"):
            refused = asked.is_refused(name, chunk, "set blocks_per_chunk: 1 for this model")
            row.expect(refused, f"blocks_per_chunk {chunk} is not refused")
            continue
        # Behind vLLM's spec a state is stored only if a chunk ends with it, and vLLM keeps none in the middle of one.
        finds_nothing = name.startswith("tier") and KEPT_EVERY_TOKENS % (chunk * BLOCK_TOKENS) > 0
        asked.check_reuse(name, chunk, finds_nothing=finds_nothing)
    return row


class _Asked:
    """A model's answers without a connector, to which those with one are compared."""

    def __init__(self, setting: Setting, model: Model, row: Row) -> None:
        self._setting = setting
        self._name = model.name
        self._row = row
        ids = random.Random(0).choices(range(VOCABULARY), k=2 * PROMPT_TOKENS)
        self._prompts = [ids[:PROMPT_TOKENS], ids[:SHARED_TOKENS] + ids[SHARED_TOKENS - PROMPT_TOKENS :]]
        self._job: dict[str, Any] = {
            "model": str(model.made_in(setting.scratch)),
            "engine": {"skip_tokenizer_init": True, "max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 4},
        }
        self._expected = [answer["tokens"] for answer in self._run(None)]
        for tokens in self._expected:
            row.expect(len(set(tokens)) > 1, f"{self._name} says the same token again and again: this shows nothing")

    def check_reuse(self, way: str, chunk: int, *, finds_nothing: bool = False) -> None:
        """Let one engine store the first prompt, and another one answer both."""
        at, row = f"{self._name}, blocks_per_chunk {chunk}", self._row
        transfer = self._transfer(way, chunk)
        kept_every = 0 if finds_nothing else KEPT_EVERY_TOKENS
        (written,) = self._run(transfer, prompts=self._prompts[:1], kept_every=kept_every)
        row.expect(written["tokens"] == self._expected[0], f"{at}: the writer's tokens differ")
        all_of_it = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        shared = SHARED_TOKENS // KEPT_EVERY_TOKENS * KEPT_EVERY_TOKENS
        expected = (0, 0) if finds_nothing else (all_of_it, shared)
        for index, answer in enumerate(self._run(transfer, kept_every=kept_every)):
            reused = answer["cached_tokens"]
            row.expect(answer["tokens"] == self._expected[index], f"{at}: tokens of prompt {index} differ")
            row.expect(reused == expected[index], f"{at}: {reused} of prompt {index} reused, not {expected[index]}")
            row.figures[f"{self._name}_{chunk}_reused_{index}"] = reused

    def is_refused(self, way: str, chunk: int, why: str) -> bool:
        """Whether an engine does not start, and says why."""
        try:
            self._run(self._transfer(way, chunk))
        except EngineFailedError as e:
            return why in str(e)
        return False

    def _run(
        self, transfer: dict[str, Any] | None, *, prompts: list[list[int]] | None = None, kept_every: int = 0
    ) -> list[dict[str, Any]]:
        # The second prompt finds nothing on the GPU that the first one has left there.
        reset = {"1": [{"do": "reset_prefix_cache", "connector": transfer is not None}]}
        job = {**self._job, "engine": {**self._job["engine"], "prefix_cache_retention_interval": kept_every}}
        result = self._setting.lab.run(transfer, prompts or self._prompts, before=reset, **job)
        answers: list[dict[str, Any]] = result["answers"]
        return answers

    def _transfer(self, way: str, chunk: int) -> dict[str, Any]:
        place = self._setting.place(f"{way}-{self._name}-{chunk}")
        config = self._setting.scratch / f"{place.folder.name}.yaml"
        config.write_text(f"blocks_per_chunk: {chunk}\nregion: {{size: 64MiB}}\ntiers:\n- {json.dumps(place.fs)}\n")
        transfer = on_cpu(vllm_config(config)[way.split()[0]])
        if not way.startswith("tier"):
            transfer["kv_connector_extra_config"]["storage_after_reset"] = "keep"
        return transfer


#: (row, ways it is run on)
LAYER_KINDS: tuple[tuple[Run, tuple[str, ...]], ...] = (
    (sliding_windows, ("spec on fs", "tier on fs", "shared_storage on fs")),
    (recurrent_states, ("spec on fs", "tier on fs", "shared_storage on fs")),
)

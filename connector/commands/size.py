"""``kvtiers size``: how much storage a model's KV cache takes, from the model's ``config.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...tiers.blocks.seal import TRAILER_BYTES
from ...tiers.config.deployment import DeploymentConfig, load_named
from ...tiers.config.tier_options import BoundedTierConfig
from ...tiers.errors import ConfigError
from ...tiers.registry import SecondaryTierFactory
from ..kv_shape import KVShape, kv_shape, number_bytes, read_model_config
from ..region.region_header import row_stride
from .options import AsJson
from .output import answer, human_bytes, say

PREFILL_SPEEDS = (1_000.0, 5_000.0, 20_000.0)
BLOCK_TOKENS = 16
BLOCKS_PER_CHUNK = 16
FORMULA = "2 x layers x KV heads x head size x bytes per number"
FORMULA_MLA = "layers x (kv_lora_rank + qk_rope_head_dim) x bytes per number, on each rank"


@dataclasses.dataclass(frozen=True, slots=True)
class Sizing:
    """What a model's tokens take, of all tensor-parallel ranks together unless a name says rank.

    Attributes:
        token_bytes: bytes of one token in the layers that keep every token. With windows or states this is less than
            what is stored.
        token_bytes_max: bytes of one token if the layers with windows keep every token as well.
        window_bytes: bytes of one whole window, in the layers that have a window; 0 without such layers.
        chunk_tokens: tokens of a stored block; None if config.json does not tell.
        block_bytes: bytes of a stored block, as a row of the region; a sealed file or object has 4 KiB more. None if
            config.json does not tell.
        block_rank_bytes: one rank's part of a stored block.
    """

    shape: KVShape
    number_bytes: int
    tp_size: int
    token_bytes: int
    token_rank_bytes: int
    token_bytes_max: int
    window_bytes: int
    chunk_tokens: int | None
    block_bytes: int | None
    block_rank_bytes: int | None

    def tokens_in(self, size_bytes: int, *, extra_bytes: int = 0) -> int | None:
        """How many tokens fit at most; None if no layer keeps every token.

        Args:
            extra_bytes: bytes beside each stored block.
        """
        if self.block_bytes is not None and self.chunk_tokens is not None:
            return size_bytes // (self.block_bytes + extra_bytes) * self.chunk_tokens
        return size_bytes // self.token_bytes if self.token_bytes else None

    def break_even_bytes_per_s(self, prefill_tokens_per_s: float) -> float:
        """The speed at which storage must deliver KV to be as fast as prefill."""
        return self.token_bytes * prefill_tokens_per_s


def size_of(
    shape: KVShape, number_bytes: int, *, tp_size: int = 1, block_tokens: int | None, blocks_per_chunk: int
) -> Sizing:
    """Compute the sizes of a model's KV.

    Args:
        block_tokens: tokens of an engine block, vLLM's ``--block-size``; None: not known.

    Raises:
        ConfigError: vLLM cannot divide the KV heads among ``tp_size`` ranks.
    """
    rank_bytes = shape.rank_bytes(shape.full_layers, number_bytes, tp_size)
    rank_bytes_of_windows = shape.rank_bytes(shape.window_layers, number_bytes, tp_size)
    # vLLM decides at its start which layers share a block, and enlarges blocks to hold a state.
    chunk_tokens = None if block_tokens is None or not shape.is_uniform else block_tokens * blocks_per_chunk
    cell_bytes = None if chunk_tokens is None else rank_bytes * chunk_tokens
    return Sizing(
        shape=shape,
        number_bytes=number_bytes,
        tp_size=tp_size,
        token_bytes=rank_bytes * tp_size,
        token_rank_bytes=rank_bytes,
        token_bytes_max=(rank_bytes + rank_bytes_of_windows) * tp_size,
        window_bytes=rank_bytes_of_windows * tp_size * shape.window_tokens,
        chunk_tokens=chunk_tokens,
        block_bytes=None if cell_bytes is None else row_stride(cell_bytes, tp_size),
        block_rank_bytes=cell_bytes,
    )


def size(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CONFIG",
            help="A model's folder, its config.json, or the hub id of a model in the local cache.",
        ),
    ],
    tp: Annotated[int, typer.Option("--tp", min=1, max=1024, help="vLLM's --tensor-parallel-size.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="vLLM's --dtype: auto, float16, bfloat16 or float32. auto: 16 bits per number.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str,
        typer.Option(help="vLLM's --kv-cache-dtype: auto (as --dtype), float16, bfloat16, fp8, fp8_e4m3 or fp8_e5m2."),
    ] = "auto",
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_536,
            help="vLLM's --block-size, in tokens. Default: 16. MLA models have no default: the GPU decides.",
        ),
    ] = None,
    blocks_per_chunk: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Engine blocks in one stored block. Default: as in --config, or 16."),
    ] = None,
    prefill: Annotated[
        list[float] | None,
        typer.Option(
            min=1e-3, max=1e12, help="Your prefill speed in tokens/s; may be repeated. Default: 1000, 5000 and 20000."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A deployment's YAML file: how many tokens fit in its region and its tiers.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute how much storage a model's KV cache takes, from its config.json. Uses no network.

    Bytes per token = 2 x layers x KV heads x head size x bytes per number. With more ranks than KV heads, vLLM keeps
    copies of heads, and they count.

    MLA models: bytes per token = layers x (kv_lora_rank + qk_rope_head_dim) x bytes per number, on each rank.

    Break-even = bytes per token x prefill speed. Loading from slower storage takes longer than prefill.

    Draft models for speculative decoding are not counted. For an unknown model type the command fails, and does not
    guess.
    """
    deployment = None if config is None else load_named(config, SecondaryTierFactory.tier_types())
    contents = read_model_config(model)
    shape = kv_shape(contents)
    sizing = size_of(
        shape,
        number_bytes(contents, dtype=dtype, kv_cache_dtype=kv_cache_dtype),
        tp_size=tp,
        # The backends of MLA models choose 16, 32, 64 or 128 by the GPU.
        block_tokens=block_size or (None if shape.is_mla else BLOCK_TOKENS),
        blocks_per_chunk=blocks_per_chunk or (deployment.blocks_per_chunk if deployment else BLOCKS_PER_CHUNK),
    )
    if sizing.block_rank_bytes is not None and sizing.block_rank_bytes * tp > 1 << 62:
        raise ConfigError("the model's numbers are too large", field="MODEL_OR_CONFIG")
    room = [] if deployment is None else room_of(sizing, deployment)
    if as_json:
        answer(_as_json(model, sizing, prefill or PREFILL_SPEEDS, room))
    else:
        for line in describe(model, sizing, prefill or PREFILL_SPEEDS, room):
            say(line)


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """How many tokens fit in one part of a deployment.

    Attributes:
        name: the part's path in the YAML file.
        max_bytes: its limit; None: it has none.
        tokens: how many fit. None: the room has no limit, or this model's tokens cannot be counted.
    """

    name: str
    max_bytes: int | None
    tokens: int | None


def room_of(sizing: Sizing, deployment: DeploymentConfig) -> list[Room]:
    """How many tokens fit in the region and in each tier of a deployment."""
    rooms = [Room("region.size", deployment.region.size, sizing.tokens_in(deployment.region.size))]
    for index, tier in enumerate(deployment.tiers):
        if isinstance(tier, BoundedTierConfig) and not tier.read_only:  # others have no limit, or ignore it
            tokens = None if tier.max_bytes is None else sizing.tokens_in(tier.max_bytes, extra_bytes=TRAILER_BYTES)
            rooms.append(Room(f"tiers[{index}].max_bytes ({tier.name or tier.type})", tier.max_bytes, tokens))
    return rooms


def describe(model: str, sizing: Sizing, speeds: Sequence[float], rooms: Sequence[Room]) -> list[str]:
    """The lines that the command prints."""
    shape = sizing.shape
    least = "" if shape.is_uniform else "at least "
    most = "" if shape.is_uniform else "at most "
    ranks = "" if sizing.tp_size == 1 else f", {human_bytes(sizing.token_rank_bytes)} on each of {sizing.tp_size} ranks"
    lines = [
        f"{model} ({shape.model_type}): {_layers(shape)}; {_heads(shape)}; {sizing.number_bytes} bytes per number",
        f"bytes per token = {FORMULA_MLA if shape.is_mla else FORMULA}",
        *_notes(sizing),
        "",
    ]
    if sizing.token_bytes:
        lines += [
            f"per token         {least}{human_bytes(sizing.token_bytes)}{ranks}",
            f"per 1,000 tokens  {least}{human_bytes(1000 * sizing.token_bytes)}",
            f"tokens per GiB    {most}{(1 << 30) // sizing.token_bytes:,}",
        ]
    else:
        lines.append("per token         not computed: no layer keeps every token")
    lines.append(f"stored block      {_block(sizing)}")
    if sizing.token_bytes:
        lines += ["", "prefill speed     break-even (bytes per token x prefill speed)"]
        lines += [
            f"{f'{speed:,.6g} tokens/s':<18}{least}{sizing.break_even_bytes_per_s(speed) / 1e6:,.0f} MB/s"
            for speed in speeds
        ]
    if rooms:
        width = max(len(room.name) for room in rooms)
        lines += ["", "tokens that fit, for all requests together (each stored prefix counts once)"]
        for room in rooms:
            # The collector keeps a tier below max_bytes.
            most = "" if sizing.block_bytes and room.name == "region.size" else "at most "
            lines.append(f"{room.name:<{width}}  {_room(room, most)}")
    return lines


def _layers(shape: KVShape) -> str:
    parts = [
        (shape.full_layers, "layers that keep every token"),
        (shape.window_layers, f"layers with a window or chunk of {shape.window_tokens:,} tokens"),
        (shape.state_layers, "layers with a recurrent state"),
    ]
    return ", ".join(f"{count} {what}" for count, what in parts if count)


def _heads(shape: KVShape) -> str:
    if shape.is_mla:
        return f"MLA, {shape.head_size} numbers in a layer"
    return f"{shape.kv_heads} KV heads x head size {shape.head_size}"


def _notes(sizing: Sizing) -> list[str]:
    shape = sizing.shape
    notes = []
    if shape.window_layers:
        notes.append(
            f"counted per token: the {shape.full_layers} layers that keep every token. Of the others, vLLM stores the "
            f"last window of a prompt (about {human_bytes(sizing.window_bytes)}). With "
            f"--disable-hybrid-kv-cache-manager it stores every token "
            f"({human_bytes(sizing.token_bytes_max)} per token in all)."
        )
    if shape.state_layers:
        notes.append(
            "not counted: the recurrent states, because config.json does not contain their size. vLLM stores one or "
            "more for each prompt."
        )
    if shape.is_mla and sizing.tp_size > 1:
        notes.append(
            "each rank has a whole copy, and the way spec stores all copies. vLLM's own region, in the way tier, may "
            "keep only one."
        )
    return notes


def _block(sizing: Sizing) -> str:
    if not sizing.shape.is_uniform:
        return "not computed: vLLM decides at its start which layers share a block; use blocks_per_chunk: 1"
    if sizing.block_bytes is None or sizing.block_rank_bytes is None:
        return "not computed: vLLM chooses the block size of MLA models by the GPU; pass --block-size"
    ranks = (
        "" if sizing.tp_size == 1 else f", {human_bytes(sizing.block_rank_bytes)} from each of {sizing.tp_size} ranks"
    )
    return (
        f"{human_bytes(sizing.block_bytes)} of {sizing.chunk_tokens:,} tokens{ranks}; 4 KiB more on disk for its seal"
    )


def _room(room: Room, most: str) -> str:
    if room.max_bytes is None:
        return "no limit is set"
    if room.tokens is None:
        return f"{human_bytes(room.max_bytes)}: not computed"
    return f"{human_bytes(room.max_bytes)}: {most}{room.tokens:,} tokens"


def _as_json(model: str, sizing: Sizing, speeds: Sequence[float], rooms: Sequence[Room]) -> dict[str, Any]:
    return {
        "model": model,
        **dataclasses.asdict(sizing),
        "is_exact": sizing.shape.is_uniform,
        "tokens_per_gib": (1 << 30) // sizing.token_bytes if sizing.token_bytes else None,
        "break_even": [
            {"prefill_tokens_per_s": speed, "bytes_per_s": sizing.break_even_bytes_per_s(speed)} for speed in speeds
        ],
        "fits": [dataclasses.asdict(room) for room in rooms],
        "notes": _notes(sizing),
    }

"""Computes the size of a model's KV cache from its ``config.json``, for ``kvtiers check --model``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...tiers.blocks.seal import TRAILER_BYTES
from ...tiers.config.deployment import DeploymentConfig
from ...tiers.config.tier_options import BoundedTierConfig
from ...tiers.config.values import human_bytes
from ...tiers.errors import ConfigError
from ..region.region_header import row_stride
from .kv_shape import KVShape, kv_shape, number_bytes, read_model_config

PREFILL_SPEEDS = (1_000.0, 5_000.0, 20_000.0)
BLOCK_TOKENS = 16
BLOCKS_PER_CHUNK = 16  # without a file that says it
FORMULA = "2 x layers x KV heads x head size x bytes per number"
FORMULA_MLA = "layers x (kv_lora_rank + qk_rope_head_dim) x bytes per number, on each rank"


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The speed at which storage must deliver KV to be as fast as prefill."""

    prefill_tokens_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Room:
    """Number of tokens that fit in a part of a deployment.

    Attributes:
        name: the part's path in the YAML file.
        max_bytes: its limit; None: it has none.
        tokens: how many fit. None: the room has no limit, or this model's tokens cannot be counted.
    """

    name: str
    max_bytes: int | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Sizing:
    """Sizes of a model's KV, for all tensor-parallel ranks together unless the name contains rank.

    Attributes:
        token_bytes: bytes of one token in the layers that keep every token. With windows or states this is less than
            what is stored.
        token_bytes_max: bytes of one token if the layers with windows keep every token as well.
        window_bytes: bytes of one whole window, in the layers that have a window; 0 without such layers.
        chunk_tokens: tokens of a stored block; None if config.json does not tell.
        block_bytes: bytes of a stored block, as a row of the region; a sealed file or object has 4 KiB more. None if
            config.json does not tell.
        block_rank_bytes: one rank's part of a stored block.
        fits: how many tokens fit in the region and in each tier of the deployment, if there is one.
    """

    model: str
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
    break_even: list[BreakEven]
    fits: list[Room]


def size_of(
    model: str,
    deployment: DeploymentConfig | None,
    *,
    tp_size: int = 1,
    kv_cache_dtype: str = "auto",
    block_tokens: int | None = None,
    speeds: Sequence[float] | None = None,
) -> Sizing:
    """Compute the sizes of a model's KV.

    Args:
        model: see ``read_model_config``.
        block_tokens: tokens of an engine block, vLLM's ``--block-size``; None: its default.
        speeds: of prefill, in tokens per second.

    Raises:
        ConfigError: the model is not found, its config.json does not tell, or vLLM cannot divide the KV heads among
            ``tp_size`` ranks.
    """
    contents = read_model_config(model)
    shape = kv_shape(contents)
    bytes_each = number_bytes(contents, kv_cache_dtype)
    rank_bytes = shape.rank_bytes(shape.full_layers, bytes_each, tp_size)
    rank_bytes_of_windows = shape.rank_bytes(shape.window_layers, bytes_each, tp_size)
    token_bytes = rank_bytes * tp_size
    # The backends of MLA models choose 16, 32, 64 or 128 tokens by the GPU. Of several kinds of layers, vLLM decides at
    # its start which share a block, and enlarges blocks to hold a state.
    if block_tokens is None and not shape.is_mla:
        block_tokens = BLOCK_TOKENS
    blocks_per_chunk = BLOCKS_PER_CHUNK if deployment is None else deployment.blocks_per_chunk
    chunk_tokens = None if block_tokens is None or not shape.is_uniform else block_tokens * blocks_per_chunk
    cell_bytes = None if chunk_tokens is None else rank_bytes * chunk_tokens
    if cell_bytes is not None and cell_bytes * tp_size > 1 << 62:
        raise ConfigError("the model's numbers are too large", field="--model")
    block_bytes = None if cell_bytes is None else row_stride(cell_bytes, tp_size)

    def tokens_in(size_bytes: int, beside_bytes: int = 0) -> int | None:
        if block_bytes is not None and chunk_tokens is not None:
            return size_bytes // (block_bytes + beside_bytes) * chunk_tokens
        return size_bytes // token_bytes if token_bytes else None

    rooms = []
    if deployment is not None:
        rooms.append(Room("region.size", deployment.region.size, tokens_in(deployment.region.size)))
        for index, tier in enumerate(deployment.tiers):
            if isinstance(tier, BoundedTierConfig) and not tier.read_only:  # other tiers have no limit, or ignore it
                tokens = None if tier.max_bytes is None else tokens_in(tier.max_bytes, TRAILER_BYTES)
                rooms.append(Room(f"tiers[{index}].max_bytes ({tier.name or tier.type})", tier.max_bytes, tokens))
    return Sizing(
        model=model,
        shape=shape,
        number_bytes=bytes_each,
        tp_size=tp_size,
        token_bytes=token_bytes,
        token_rank_bytes=rank_bytes,
        token_bytes_max=token_bytes + rank_bytes_of_windows * tp_size,
        window_bytes=rank_bytes_of_windows * tp_size * shape.window_tokens,
        chunk_tokens=chunk_tokens,
        block_bytes=block_bytes,
        block_rank_bytes=cell_bytes,
        break_even=[BreakEven(speed, token_bytes * speed) for speed in speeds or PREFILL_SPEEDS],
        fits=rooms,
    )


def describe(sizing: Sizing) -> list[str]:
    """The lines that the command prints."""
    shape, each = sizing.shape, f" on each of {sizing.tp_size} ranks"
    least, most = ("", "") if shape.is_uniform else ("at least ", "at most ")
    lines = [
        f"{sizing.model}: {_layers(shape)}; {_heads(shape)}; {sizing.number_bytes} bytes per number",
        f"bytes per token = {FORMULA_MLA if shape.is_mla else FORMULA}",
        *_notes(sizing),
        "",
    ]
    if sizing.token_bytes:
        ranks = "" if sizing.tp_size == 1 else f", {human_bytes(sizing.token_rank_bytes)}{each}"
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
        for one in sizing.break_even:
            speed = f"{one.prefill_tokens_per_s:,.6g} tokens/s"
            lines.append(f"{speed:<18}{least}{one.bytes_per_s / 1e6:,.0f} MB/s")
    if sizing.fits:
        width = max(len(room.name) for room in sizing.fits)
        lines += ["", "tokens that fit, for all requests together (each stored prefix counts once)"]
        for room in sizing.fits:
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
    if shape.is_mla:
        notes.append("if vLLM does not run this model as MLA (see its log), it stores K and V of every head: far more.")
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

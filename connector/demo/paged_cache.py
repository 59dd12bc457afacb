"""Paged KV memory for transformers' own attention.

transformers passes each layer's new keys and values to a ``Cache``, and attends over the keys and values that the cache
returns. ``RequestCache`` writes the new ones into the engine's blocks by slot, and returns the request's in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ...tiers.errors import ConfigError
from ..base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor


def _reject_rope_by_length(module: Any) -> None:
    """Raise ConfigError if rotary embeddings depend on the prompt's length.

    With such a rope type, transformers rotates the keys of each forward for the length reached so far. A prompt read in
    pieces then has keys for several lengths, and a stored prefix fits only prompts of the length it was computed with.
    """
    for part in module.modules():
        of_part = getattr(part, "rope_type", None)
        for rope_type in of_part.values() if isinstance(of_part, dict) else [of_part]:
            if isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type):
                raise ConfigError(
                    f"this model's keys depend on the prompt's length (rope_type {rope_type!r}), so stored keys do not "
                    "fit another prompt; the demo's engine runs models with another rope_type",
                    field="--model",
                )


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one token's KV: in each layer ``kv_heads`` keys and as many values, each of ``head_dim`` numbers."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of_model(cls, module: Any) -> KVLayout:
        """Find a model's layout by one forward of one token: model families differ in how their configs name it.

        Raises:
            ConfigError: the layers do not all keep keys and values of one shape for every token, or a token's keys
                depend on the prompt's length.
        """
        _reject_rope_by_length(module)
        cache = DynamicCache()
        unsuited = ConfigError(
            "this model's layers do not all keep keys and values of one shape; the demo's engine runs models with "
            "plain attention in every layer (Llama, Qwen, Mistral, SmolLM, …)",
            field="--model",
        )
        token = torch.zeros((1, 1), dtype=torch.long, device=module.device)
        try:
            with torch.inference_mode():
                module(token, past_key_values=cache, use_cache=True)
        except (IndexError, ValueError) as e:  # hybrid models look in the cache for the states of their other layers
            raise unsuited from e
        layers = [layer for layer in cache.layers if type(layer) is DynamicLayer]
        tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
        kinds = {(tensor.shape, tensor.dtype) for tensor in tensors}
        if len(kinds) != 1 or len(tensors) != 2 * len(cache.layers):
            raise unsuited
        (_, kv_heads, _, head_dim), dtype = kinds.pop()
        return cls(len(layers), kv_heads, head_dim, dtype)

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one block in one layer."""
        return 2 * block_size * self.kv_heads * self.head_dim * self.dtype.itemsize


class PagedKVCache:
    """The engine's KV memory: one tensor per layer, all allocated and touched at the start.

    Args:
        num_blocks: number of blocks, of ``block_size`` tokens each.

    Attributes:
        tensors: per layer (num_blocks, 2, block_size, kv_heads, head_dim), contiguous; index 0 of the second dimension
            holds keys, 1 values.
        block_ids: all blocks, in the order in which a request uses them.
    """

    def __init__(self, layout: KVLayout, *, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        shape = (num_blocks, 2, block_size, layout.kv_heads, layout.head_dim)
        # Not torch.zeros: its pages are mapped only at the first write, at 0.2 to 1 GB/s and during a prefill.
        self.tensors = [torch.empty(shape, dtype=layout.dtype, device=device).zero_() for _ in range(layout.num_layers)]
        # A layer's blocks are copied here, in order, for attention. All layers share it; it has one layer's size.
        self.workspace = torch.empty_like(self.tensors[0]).zero_()
        self.block_ids = list(range(num_blocks))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.layout.num_layers * self.layout.page_bytes(self.block_size)

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers, in order."""
        return tuple(f"layers.{index}" for index in range(len(self.tensors)))

    def canonical(self) -> CanonicalKVCaches:
        """Return the tensors in the form that offloading expects: int8 (num_blocks, page_bytes) views, one KV group."""
        page_bytes = self.layout.page_bytes(self.block_size)
        views = [tensor.view(self.num_blocks, -1).view(torch.int8) for tensor in self.tensors]
        return CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(view, page_bytes) for view in views],
            group_data_refs=[[CanonicalKVCacheRef(index, page_bytes) for index in range(len(views))]],
        )


class RequestCache(Cache):
    """One request's view of the paged memory, with the interface that transformers expects.

    Args:
        memory: the engine's blocks.
        block_ids: ids of the request's blocks, in order.
        on_layer: called with a layer's index when its keys and values are written.
    """

    def __init__(self, memory: PagedKVCache, block_ids: Sequence[int], on_layer: Callable[[int], None]) -> None:
        self.memory = memory
        self.on_layer = on_layer
        self.block_ids = torch.tensor(block_ids, device=memory.device)
        self.num_computed = 0
        super().__init__(layers=[_PagedLayer(self, index) for index in range(memory.layout.num_layers)])

    def begin(self, num_computed: int, num_new: int) -> None:
        """Prepare a forward of ``num_new`` tokens after ``num_computed`` tokens whose KV is in the blocks."""
        size = self.memory.block_size
        self.num_computed = num_computed
        positions = torch.arange(num_computed, num_computed + num_new, device=self.memory.device)
        # Slots count tokens through the flattened (num_blocks, 2, block_size): a block's keys, then its values.
        self.key_slots = self.block_ids[positions // size] * (2 * size) + positions % size
        self.value_slots = self.key_slots + size
        blocks = self.block_ids[: -(-(num_computed + num_new) // size)]
        # Rows of the flattened (num_blocks, 2): all keys of the request, then all values.
        self.rows = torch.cat((blocks * 2, blocks * 2 + 1))


class _PagedLayer(DynamicLayer):
    """One layer of a RequestCache."""

    def __init__(self, owner: RequestCache, layer_idx: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._index = layer_idx
        self._tensor = owner.memory.tensors[layer_idx]
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002 - for other kinds of layers
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values, (1, kv_heads, n, head_dim); return all keys and values of the request."""
        owner, tensor = self._owner, self._tensor
        slots = tensor.view(-1, *tensor.shape[3:])
        slots.index_copy_(0, owner.key_slots, key_states[0].transpose(0, 1))
        slots.index_copy_(0, owner.value_slots, value_states[0].transpose(0, 1))
        owner.on_layer(self._index)
        if owner.num_computed == 0:
            return key_states, value_states  # these are all blocks, in order
        rows = tensor.view(-1, *tensor.shape[2:])
        ordered = owner.memory.workspace.view(-1, *tensor.shape[2:])[: len(owner.rows)]
        torch.index_select(rows, 0, owner.rows, out=ordered)
        length = owner.num_computed + key_states.shape[2]
        both = ordered.view(2, -1, *tensor.shape[3:])[:, :length].transpose(1, 2)
        return both[:1], both[1:]

    def get_seq_length(self) -> int:
        """Return the number of tokens whose KV is in the blocks, without the tokens of the running forward."""
        return self._owner.num_computed

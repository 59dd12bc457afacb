from __future__ import annotations

import pytest
import torch

from kvtiers.connector.transfer.canonical import canonicalize_kv_caches

NUM_BLOCKS, TOKENS, HEADS, DIM = 7, 4, 2, 8
PAGE = TOKENS * HEADS * DIM * 2  # bfloat16


def filled(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.int16).view(torch.bfloat16).view(shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.int8)


def test_keys_and_values_first_are_two_tensors() -> None:
    kv = filled(2, NUM_BLOCKS, TOKENS, HEADS, DIM)
    caches = canonicalize_kv_caches({"a": kv}, [["a"]], NUM_BLOCKS)
    assert [entry.page_size_bytes for entry in caches.tensors] == [PAGE, PAGE]
    assert [(ref.tensor_idx, ref.page_size_bytes) for ref in caches.group_data_refs[0]] == [(0, PAGE), (1, PAGE)]
    for half, entry in enumerate(caches.tensors):
        assert entry.tensor.shape == (NUM_BLOCKS, PAGE)
        assert entry.tensor.dtype == torch.int8
        for block in range(NUM_BLOCKS):
            assert torch.equal(entry.tensor[block], as_bytes(kv[half, block]))


def test_blocks_first_are_one_tensor_with_both_halves_in_its_page() -> None:
    kv = filled(NUM_BLOCKS, 2, TOKENS, HEADS, DIM)
    (entry,) = canonicalize_kv_caches({"a": kv}, [["a"]], NUM_BLOCKS).tensors
    assert entry.tensor.shape == (NUM_BLOCKS, 2 * PAGE)
    assert all(torch.equal(entry.tensor[block], as_bytes(kv[block])) for block in range(NUM_BLOCKS))


def test_the_order_in_memory_counts_and_not_that_of_the_dimensions() -> None:
    """Logically (2, blocks, tokens, heads, dim), in memory (blocks, 2, heads, tokens, dim)."""
    memory = filled(NUM_BLOCKS, 2, HEADS, TOKENS, DIM)
    kv = memory.permute(1, 0, 3, 2, 4)
    assert kv.shape == (2, NUM_BLOCKS, TOKENS, HEADS, DIM)
    (entry,) = canonicalize_kv_caches({"a": kv}, [["a"]], NUM_BLOCKS).tensors
    assert all(torch.equal(entry.tensor[block], as_bytes(memory[block])) for block in range(NUM_BLOCKS))


def test_views_are_the_tensors_own_memory() -> None:
    kv = filled(NUM_BLOCKS, TOKENS, DIM)
    (entry,) = canonicalize_kv_caches({"mla": kv}, [["mla"]], NUM_BLOCKS).tensors
    entry.tensor[3].fill_(0)
    assert not kv[3].any()
    assert kv[2].any()


def test_space_between_blocks_stays_out_of_the_page() -> None:
    padded = filled(NUM_BLOCKS, TOKENS * DIM + 24)
    kv = padded[:, : TOKENS * DIM].view(NUM_BLOCKS, TOKENS, DIM)
    (entry,) = canonicalize_kv_caches({"a": kv}, [["a"]], NUM_BLOCKS).tensors
    assert entry.page_size_bytes == TOKENS * DIM * 2
    assert entry.tensor.stride() == (2 * (TOKENS * DIM + 24), 1)
    assert all(torch.equal(entry.tensor[block], as_bytes(kv[block])) for block in range(NUM_BLOCKS))


def test_layers_interleaved_in_one_storage_are_strided_views() -> None:
    """Per block: keys of all layers, then values of all layers."""
    layers = 3
    memory = filled(NUM_BLOCKS, 2, layers, TOKENS, DIM)
    kv_caches = {f"l{layer}": memory[:, :, layer] for layer in range(layers)}
    caches = canonicalize_kv_caches(kv_caches, [list(kv_caches)], NUM_BLOCKS)
    assert len(caches.tensors) == 2 * layers
    for at, entry in enumerate(caches.tensors):
        layer, half = divmod(at, 2)
        assert all(torch.equal(entry.tensor[b], as_bytes(memory[b, half, layer])) for b in range(NUM_BLOCKS))


def test_layers_that_share_memory_share_a_view() -> None:
    """Two groups take turns on one pool of blocks; the second layer's page is shorter."""
    pool = filled(NUM_BLOCKS, TOKENS * DIM)
    kv_caches = {"full": pool.view(NUM_BLOCKS, TOKENS, DIM), "sliding": pool[:, : 3 * DIM], "again": pool}
    caches = canonicalize_kv_caches(kv_caches, [["full", "again"], ["sliding"]], NUM_BLOCKS)
    (entry,) = caches.tensors
    assert entry.page_size_bytes == TOKENS * DIM * 2
    assert [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in caches.group_data_refs] == [
        [(0, TOKENS * DIM * 2)],
        [(0, 3 * DIM * 2)],
    ]


def test_a_layer_with_several_tensors() -> None:
    states = [filled(NUM_BLOCKS, 3, 5), filled(NUM_BLOCKS, 6).float()]
    caches = canonicalize_kv_caches({"mamba": states}, [["mamba"]], NUM_BLOCKS)
    assert [entry.page_size_bytes for entry in caches.tensors] == [30, 24]
    assert torch.equal(caches.tensors[1].tensor[4], as_bytes(states[1][4]))


def test_one_block() -> None:
    kv = filled(2, 1, TOKENS, DIM)
    (entry,) = canonicalize_kv_caches({"a": kv}, [["a"]], 1).tensors
    assert torch.equal(entry.tensor[0], as_bytes(kv))


def test_a_tensor_in_the_middle_of_its_storage() -> None:
    memory = filled(5, NUM_BLOCKS, DIM)
    (entry,) = canonicalize_kv_caches({"a": memory[3]}, [["a"]], NUM_BLOCKS).tensors
    assert torch.equal(entry.tensor[6], as_bytes(memory[3, 6]))


def test_an_ambiguous_block_dimension_has_to_be_named() -> None:
    kv = filled(TOKENS, TOKENS, DIM)
    with pytest.raises(ValueError, match=r"layer a: shape \(4, 4, 8\) has 2 dimensions of 4 blocks"):
        canonicalize_kv_caches({"a": kv}, [["a"]], TOKENS)
    caches = canonicalize_kv_caches({"a": kv}, [["a"]], TOKENS, block_dims={"a": 1})
    assert torch.equal(caches.tensors[2].tensor[1], as_bytes(kv[2, 1]))
    with pytest.raises(ValueError, match="dimension 2 of shape"):
        canonicalize_kv_caches({"a": kv}, [["a"]], TOKENS, block_dims={"a": 2})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (filled(5, 6), "has 0 dimensions of 7 blocks"),
        (filled(NUM_BLOCKS, 1).expand(NUM_BLOCKS, 9), "share memory"),
        (filled(1, 9).expand(NUM_BLOCKS, 9), "share memory"),
        (filled(NUM_BLOCKS, 200)[:, ::2], "is 100 pieces of memory, accepted are 64"),
    ],
)
def test_tensors_without_dense_blocks_are_refused(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        canonicalize_kv_caches({"a": tensor}, [["a"]], NUM_BLOCKS)


def test_groups_name_every_layer() -> None:
    kv = filled(NUM_BLOCKS, DIM)
    with pytest.raises(ValueError, match=r"unknown: \['b'\], in no group: \['a'\]"):
        canonicalize_kv_caches({"a": kv}, [["b"]], NUM_BLOCKS)

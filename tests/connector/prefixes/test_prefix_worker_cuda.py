"""A step's KV is saved from CUDA buffers: the engine's thread does not wait, and later steps change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import Any

import pytest
import torch

from kvtiers.connector.prefixes.requests import Transfer
from kvtiers.connector.prefixes.worker import PrefixWorker
from kvtiers.tiers.daemon_pool import DaemonPool
from tests import gpu_machine

pytestmark = pytest.mark.gpu

LAYERS, BLOCKS, SIZE = 4, 64, 16
BUSY_CYCLES = 1_000_000_000  # about half a second


@pytest.fixture(scope="module", autouse=True)
def _cuda() -> None:
    gpu_machine.skip_without_cuda()


class Published:
    """Keeps what it is to publish."""

    def __init__(self) -> None:
        self.layers: dict[str, torch.Tensor] = {}

    def publish(self, hashes: Sequence[bytes], layers: Mapping[str, torch.Tensor]) -> bool:
        assert len(hashes) == 2
        self.layers = {name: layer.clone() for name, layer in layers.items()}
        return True


@pytest.mark.parametrize("layout", [(BLOCKS, 2, SIZE, 8, 128), (2, BLOCKS, SIZE, 8, 128), (BLOCKS, 8, SIZE, 256)])
def test_saves_have_this_steps_kv_and_do_not_wait_for_it(layout: tuple[int, ...]) -> None:
    buffers = {f"layer.{at}": torch.empty(layout, dtype=torch.bfloat16, device="cuda") for at in range(LAYERS)}
    pool, store = DaemonPool(1, "test"), Published()
    worker = PrefixWorker(pool, BLOCKS, SIZE, 20.0)
    worker.register(buffers)
    slots = torch.arange(5 * SIZE, 7 * SIZE)
    transfer = _store(slots)
    worker.publish(store, [transfer])  # type: ignore[arg-type]  # a first time: CUDA loads kernels, and pins memory
    wait(list(worker._saving))
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    for at, buffer in enumerate(buffers.values()):
        buffer.fill_(at + 1)
    computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
    computed.record()
    worker.publish(store, [transfer])  # type: ignore[arg-type]
    assert not computed.query(), "the engine's thread waited for the step"  # type: ignore[no-untyped-call]
    for buffer in buffers.values():
        buffer.zero_()  # the next step has these blocks
    wait(list(worker._saving))
    assert list(store.layers) == list(buffers)
    for at, layer in enumerate(store.layers.values()):
        assert layer.shape[0] == len(slots)
        assert layer.numel() == len(slots) * 2 * 8 * 128
        assert bool((layer == at + 1).all())
    worker.shutdown(1.0, 0.5)
    pool.shutdown(0.5)


def _store(slots: torch.Tensor) -> Any:
    return Transfer(req_id="r", hashes=[b"a", b"b"], slot_mapping=slots, first_block=0, is_store=True)

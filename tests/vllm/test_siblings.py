"""Connectors beside ours in vLLM's MultiConnector, whose loads may fail within a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from connector.vllm import siblings
from connector.vllm.connector import KVTiersConnector
from connector.vllm.shared_storage import SharedStorageConnector
from tiers.errors import ConfigError


def fake(name: str, module: str = "vllm.elsewhere", **extra: Any) -> Any:
    """A connector of a class with this name."""
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    return type(name, (SimpleNamespace,), {"__module__": module})(_kv_transfer_config=transfer)


def several(*connectors: Any) -> Any:
    multi = fake("MultiConnector")
    multi._connectors = list(connectors)
    return multi


def ours(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(OffloadingConnector, "register_kv_caches", lambda *_: None)
    return KVTiersConnector.__new__(KVTiersConnector)


def prefixes() -> Any:
    connector: Any = SharedStorageConnector.__new__(SharedStorageConnector)
    connector._worker = SimpleNamespace(register=lambda _: None)
    return connector


def in_worker(top: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "get_kv_transfer_group", lambda: top)
    monkeypatch.setattr(siblings, "has_kv_transfer_group", lambda: True)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (fake("LMCacheConnectorV1"), "LMCacheConnectorV1"),
        (fake("MooncakeStoreConnector", load_async=False), "MooncakeStoreConnector"),
        (fake("NixlConnector", "elsewhere"), "NixlConnector"),
        (several(several(fake("ExampleConnector"))), "ExampleConnector"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_connector_beside_ours_that_may_load_within_a_step_is_refused_at_the_start(
    other: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = ours(monkeypatch)
    in_worker(several(prefixes(), connector, other), monkeypatch)
    with pytest.raises(ConfigError, match=f"^connectors: {named} may load.*SharedStorageConnector"):
        connector.register_kv_caches({})
    prefixes().register_kv_caches({})  # which looks at each step instead


def test_connectors_beside_ours_may_load_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = ours(monkeypatch)
    names = ("NixlConnector", "LMCacheMPConnector", "MooncakeStoreConnector")
    for top in (several(prefixes(), connector, *map(fake, names)), connector):
        in_worker(top, monkeypatch)
        connector.register_kv_caches({})


def test_a_connector_that_makes_kv_up_is_refused_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for connector in (ours(monkeypatch), prefixes()):
        in_worker(several(connector, fake("DecodeBenchConnector")), monkeypatch)
        with pytest.raises(ConfigError, match="DecodeBenchConnector"):
            connector.register_kv_caches({})


def test_a_block_of_a_failed_load_is_good_again_when_it_holds_another() -> None:
    untrusted = siblings.Untrusted(steps_max=2)
    untrusted.note([(1, b"1")])
    untrusted.begin_step()
    untrusted.note([(2, b"2")])
    assert not untrusted.has_any([(1, b"1"), (2, b"2")])
    untrusted.load_failed()
    assert untrusted.has_any([(1, b"1")])
    assert untrusted.has_any([(2, b"2")])
    assert not untrusted.has_any([(1, b"2"), (2, b"1"), (3, b"1")])

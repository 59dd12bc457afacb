"""What the doors for SGLang and LMCache share, without either engine."""

from __future__ import annotations

import json
import re
import socket
from contextlib import closing
from pathlib import Path

import pytest

from kvtiers.connector.base import CacheConfig, ModelConfig, OffloadingConfig
from kvtiers.connector.engines.door import (
    Door,
    check_options,
    counted_revision,
    serve_metrics,
    staging_of,
    tier_options,
    weights_digest,
)
from kvtiers.connector.engines.release import Release
from kvtiers.connector.ranks.place import rank_tier
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.metrics import Metrics
from tests.identity import block_key

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("sglang", ("backend_name", "module_path", "class_name", "interface_v1")), ("lmcache", ("revision",))],
)
def test_shipped_options_are_accepted_and_shown_in_the_docs(name: str, theirs: tuple[str, ...]) -> None:
    text = (ROOT / "configs" / f"{name}.json").read_text()
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert re.search(r"```json\n(.*?)```", page, re.DOTALL)[1] == text  # type: ignore[index]
    options = json.loads(text)
    assert options["module_path"] == f"kvtiers.{name}"
    assert options["class_name"] in (ROOT / "kvtiers" / f"{name}.py").read_text()
    options = options.get("adapter_params", options)
    check_options(options, theirs)
    assert rank_tier(tier_options(options)).type == "fs"
    assert staging_of(options) == 256 << 20


def test_misspelled_option_and_wrong_size_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="stagin: is not an option of kvtiers; accepted are"):
        check_options({"stagin": 1}, ())
    tier = {"shared_storage_path": "/kv"}
    for never in ({**tier, "load": "never"}, {"tier": {"type": "fs", "root_dir": "/kv", "load": "never"}}):
        with pytest.raises(ConfigError, match="load: 'never' is not accepted: the engine decides what it loads"):
            check_options(never, ())
    check_options({**tier, "load": "always"}, ())
    with pytest.raises(ConfigError, match="staging: "):
        check_options({**tier, "staging": "much"}, ())
    with pytest.raises(ConfigError, match="metrics_port: '9100' is not accepted; write 1 to 65535"):
        check_options({**tier, "metrics_port": "9100"}, ())


def test_taken_metrics_port_is_logged_and_blocks_still_move(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = OffloadingConfig(ModelConfig("org/model", "bfloat16", "abc"), CacheConfig(16), inference_engine="test")
    options = {"tier": {"type": "fs", "root_dir": str(tmp_path), "min_free": 0}, "staging": "1MiB"}
    blocks = [[memoryview(bytearray(4096))]]
    metrics = Metrics()
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        closing(Door(config, options, 4096, metrics, "r0")) as door,
    ):
        port = taken.getsockname()[1]
        assert serve_metrics({"metrics_port": port}, metrics) is None
        assert f"metrics are not served on 127.0.0.1:{port}" in caplog.text
        assert door.store([block_key(1)], blocks) == [True]


def test_weights_digest_uses_content_or_revision_and_is_none_without_either(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    one = weights_digest(str(tmp_path), None)
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert one != weights_digest(str(tmp_path), None)
    assert weights_digest("org/not-here", None) is None
    assert weights_digest("org/not-here", "v1") == "v1"
    assert counted_revision("v1", {}) == "v1"
    assert counted_revision("v1", {"a": 1}) != counted_revision("v1", {"a": 2})


def test_error_for_changed_release_names_missing_parts() -> None:
    used = {"json": ["loads(_)", "dumps(_, sort=)", "gone"], "json:JSONDecoder": ["decode(_)"], "no_such": ["x"]}
    with pytest.raises(ConfigError) as caught:
        Release("pytest", ("1",), used).check()
    assert "json.gone is gone" in str(caught.value)
    assert "no_such cannot be imported" in str(caught.value)
    assert "decode" not in str(caught.value)
    Release("pytest", ("1",), {"json": ["loads(_)"]}).check()

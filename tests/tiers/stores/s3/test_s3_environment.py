"""Variables that only obstore reads: none changes what is sent, and none makes a client fail."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import files
from pathlib import Path

import pytest

from kvtiers.tiers.stores.s3.obstore_client import hidden_from_obstore
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing.contract import as_parts, fetch
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from tests.tiers.stores.s3.test_s3_config import _credentials as _credentials  # an autouse fixture

DATA = bytes(range(256))
_BY_REQUEST = {"authorization", "x-amz-date", "host"}
#: What boto3 reads as well, where it is an operator's choice.
_CHOICES = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}


def documented_variables() -> dict[str, set[str]]:
    """Every option of obstore's own typed configuration as a variable -> values that would change something."""
    variables: dict[str, set[str]] = {}
    for path in files("obstore") or ():
        if path.match("_store/_aws.pyi") or path.match("_store/_client.pyi") or path.match("_store/_retry.pyi"):
            for node in ast.walk(ast.parse(Path(path.locate()).read_text())):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                    for option, values in options_of(node):
                        variables.setdefault(option, set()).update(values)
    return variables


def options_of(config: ast.ClassDef) -> Iterator[tuple[str, set[str]]]:
    for option, described in zip(config.body, [*config.body[1:], None], strict=True):
        if not isinstance(option, ast.AnnAssign) or not isinstance(option.target, ast.Name):
            continue
        values = {"poison"}
        names = {name.id for name in ast.walk(option.annotation) if isinstance(name, ast.Name)}
        if "bool" in names:
            values |= {"true", "false"}
        values |= {str(literal.value) for literal in ast.walk(option.annotation) if isinstance(literal, ast.Constant)}
        text = ast.unparse(described) if isinstance(described, ast.Expr) else ""
        values |= set(re.findall(r'- `"([^"<>]+)"`', text))
        name = option.target.id.upper()
        for variable in {name if name.startswith("AWS_") else f"AWS_{name}", *re.findall(r"`(AWS_[A-Z0-9_]+)`", text)}:
            yield variable, values


#: Of typed values that other types name, such as Literals behind an alias.
MORE = {
    "AWS_CHECKSUM_ALGORITHM": {"sha256", "crc64nvme"},
    "AWS_SERVER_SIDE_ENCRYPTION": {"AES256", "aws:kms", "sse-c"},
    "AWS_CONDITIONAL_PUT": {"disabled"},
}
VARIABLES = {name: values | MORE.get(name, set()) for name, values in documented_variables().items()}


def test_the_variables_are_found() -> None:
    assert len(VARIABLES) > 50
    assert VARIABLES.keys() >= {*MORE, "AWS_SSE_CUSTOMER_KEY_BASE64", "AWS_DISABLE_TAGGING", "AWS_PROXY_URL"}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpFaultServer]:
    with HttpFaultServer() as server:
        yield server


def sent(server: HttpFaultServer) -> list[tuple[str, str, dict[str, str]]]:
    """What a store sends: methods, paths and headers."""
    before = len(server.requests())
    options = S3Options(bucket="bucket", endpoint_url=server.endpoint_url, retries=0)
    options = replace(options, request_timeout_s=120.0)
    server.s3.remove_objects("bucket", lambda _: True)
    store = S3Store(options)
    store.put("f/a", as_parts(DATA))
    store.put("f/a", as_parts(DATA), overwrite=True)
    assert fetch(store, "f/a", len(DATA)) == DATA
    assert store.size_many(["f/a", "f/b"]) == [len(DATA), None]
    store.close()
    return [
        (r.method, r.path, {n: v for n, v in r.headers.items() if n not in _BY_REQUEST})
        for r in server.requests()[before:]
    ]


def test_option_of_obstores_own_changes_nothing(server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round sets every variable, to the next of its values."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    usual = sent(server)
    poisons = {name: sorted(VARIABLES[name]) for name in VARIABLES.keys() - _CHOICES - {"AWS_DEFAULT_REGION"}}
    for at in range(max(map(len, poisons.values()))):
        for name, values in poisons.items():
            monkeypatch.setenv(name, values[at % len(values)])
        assert sent(server) == usual


def test_variables_are_there_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "poison")
    read = [sys.executable, "-c", "import os; print(os.environ.get('AWS_CHECKSUM_ALGORITHM'))"]
    with hidden_from_obstore():
        assert os.environ["AWS_CHECKSUM_ALGORITHM"] == "poison"
        assert subprocess.run(read, capture_output=True, text=True, check=True).stdout == "None\n"
    assert subprocess.run(read, capture_output=True, text=True, check=True).stdout == "poison\n"

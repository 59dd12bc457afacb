"""Which modules an import loads, and which are never imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for package in ("tiers", "connector", "kvtiers") for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("modules", ["kvtiers, kvtiers.vllm, kvtiers.tiers.registry", "kvtiers.connector.core.manager"])
def test_import_loads_no_client_and_no_engine(modules: str) -> None:
    heavy = ("torch", "vllm", "boto3", "botocore", "awscrt", "fsspec", "s3fs", "prometheus_client", "cryptography")
    code = f"import sys, {modules}; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_shipped_code_has_no_pickle_eval_or_other_execution_of_data() -> None:
    """X1: no pickle, marshal, shelve, eval, exec or torch.load anywhere in what we ship."""
    forbidden_modules = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    forbidden_calls = {"eval", "exec", "compile", "__import__"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not {name.name.split(".")[0] for name in node.names} & forbidden_modules, where
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] not in forbidden_modules, where
            elif isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name):
                    assert node.func.id not in forbidden_calls, where
                elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                    assert (node.func.value.id, node.func.attr) not in {("torch", "load"), ("yaml", "load")}, where

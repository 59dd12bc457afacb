"""Writes docs/commands.md: every command, run on files, on S3 (SeaweedFS) and on a memory tier.

    python -m tests.docs.run_commands

The blocks are made up; everything else is as it happened. Needs the program ``weed``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
import yaml

from kvtiers.connector.commands.json_schemas import DOCUMENTS
from kvtiers.connector.commands.results import Tiers
from kvtiers.connector.commands.session import EXIT_CODES
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.testing.servers import SeaweedServer, seaweed_server
from tests.connector.commands.model_configs import LLAMA_8B
from tests.connector.core.test_record import (
    all_is_found,
    another_engine_stored_it_with_another_layout,
    block_outlives_its_ttl,
    storage_is_full,
)
from tests.identity import FakeSpec, block_key

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
KVTIERS = str(Path(sys.executable).with_name("kvtiers"))
WORK = Path("/tmp/kvtiers-commands")
BUCKET = "kvtiers"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ROWS, ROW_BYTES = 160, 64 << 10

HEAD = """\
# Every command, run

On a folder, on a bucket (SeaweedFS) and on a memory tier, 160 blocks of 64 KiB in each of the first two. Written by
`python -m tests.docs.run_commands`, on 2 cores that also did other work: [benchmarks](benchmarks.md) has speeds to
compare with. The [README](../README.md#two-commands) describes `demo`.

## What all commands share

- `CONFIG` is the deployment's YAML file, or only the storage: a folder (a tier of type `fs`, on an NFS mount `nfs`),
  `s3://bucket/prefix` (type `s3`) or another URL (type `fsspec`). Without the argument, `$KVTIERS_CONFIG` is used.
  `check` and `vllm-config` need a YAML file, `demo` has an option `--config` instead, and `explain` takes the file of
  `trace_requests`, or the address of an engine's metrics.
- A folder or URL has no limits, keys or options. `gc` therefore needs `--max-bytes` or `--ttl`. `verify --repair`,
  `rm` and `copy` work as with a file; `copy` leaves 1 GiB of the disk free. For blocks that `encrypt` protects, give
  the YAML file.
- `ls`, `du`, `show`, `explain`, `vllm-config`, `check`, `verify`, and `gc`, `rm` and `copy` with `--dry-run` change
  nothing. (They open a tier of type `store`, and its module may create its folder then.)
  `check --write` and `bench` write blobs of their own and remove them; `gc`, `rm` and `verify --repair` remove blocks;
  `copy` writes blocks to the target.
- If you type an old command (`doctor`, `migrate`, `serve-metrics`, `size`, `warm`), kvtiers prints its replacement and
  exits with 2.
- `-h` shows help; `-v` shows log lines and `-vv` more, as does `--log-level`; `-q` shows only results and errors.
- Work that takes longer than 2 s shows its progress on standard error, if that is a terminal: amount, rate, and time
  left where the total is known. `--no-progress` turns it off.
- After Ctrl-C, one line says what was done and how to continue.
- `kvtiers --install-completion` installs the completion of commands and options for bash, zsh, fish or PowerShell;
  `--show-completion` only prints it.

### Exit codes

{exit_codes}

### JSON

With `--json`, each command prints one document on one line, also after an error:

| field | content |
|---|---|
| `command`, `version` | the command's name, and the version of kvtiers |
| `ok` | whether the exit code is 0 |
| `result` | as below; null if the command ended before it had a result |
| `errors` | the lines that were also printed to standard error |

`kvtiers COMMAND --json-schema` prints the document's JSON schema. `ls` prints one line for each block (`tier`, `key`,
`size`, `mtime`, `rank`, `group`) before its document. `demo --json FILE` is another option: it writes measurements.

{results}"""


def tiers_of(server: SeaweedServer) -> dict[str, dict[str, Any]]:
    """The tiers by name."""
    endpoint = server.s3.endpoint_url
    s3 = {"type": "s3", "bucket": BUCKET, "endpoint_url": endpoint}
    return {
        "files": {"type": "fs", "name": "files", "root_dir": str(WORK / "kv"), "max_bytes": "8MiB", "ttl": "30d"},
        "bucket": {**s3, "name": "bucket", "prefix": "one", "max_bytes": "8MiB"},
        "ram": {"type": "memory", "name": "ram", "max_bytes": "64MiB"},
        "near": {"type": "fs", "name": "near", "root_dir": str(WORK / "near"), "max_bytes": "1GiB"},
        "far": {**s3, "name": "far", "prefix": "two"},
    }


def fill(options: dict[str, Any]) -> None:
    """Have an engine store ROWS blocks, unbounded."""
    options = {name: value for name, value in options.items() if name not in ("max_bytes", "ttl")}
    rows = np.random.default_rng(1).integers(-128, 128, (ROWS, ROW_BYTES), np.int8)
    tier = SecondaryTierFactory.create_secondary_tier(options, rows.data, FakeSpec())
    tier.submit_store(JobMetadata(1, [block_key(number) for number in range(ROWS)], np.arange(ROWS, dtype=np.int32)))
    tier.drain_jobs()
    (result,) = tier.get_finished()
    tier.shutdown()
    assert result.success


def spoil(server: SeaweedServer) -> None:
    """Flip a bit of a block in the folder and of one in the bucket."""
    path = sorted((WORK / "kv").rglob("*.bin"))[7]
    path.write_bytes(_flipped(path.read_bytes()))
    client = server.s3.client()
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix="one/")["Contents"]
    key = next(one["Key"] for one in listed if one["Key"].endswith(".bin"))
    body = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    client.put_object(Bucket=BUCKET, Key=key, Body=_flipped(body))


def _flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def head() -> str:
    """The page's beginning, with the tables that come from the code."""
    codes = [f"| {code.value} | {text} |" for code, text in EXIT_CODES.items()]
    rows = []
    for command, document in DOCUMENTS.items():
        (result,) = get_args(document)
        text = _fields(result)
        if get_origin(result) is Tiers:
            (of_tier,) = get_args(result)
            kinds = "; or ".join(map(_fields, get_args(of_tier) or (of_tier,)))
            text = f"`tiers`, a list: {kinds}; or `tier`, `where` and `error`"
        rows.append(f"| `{command}` | {text} |")
    return HEAD.format(
        exit_codes="\n".join(["| code | meaning |", "|---:|---|", *codes]),
        results="\n".join(["| command | `result` |", "|---|---|", *rows]),
    )


def _fields(result: Any) -> str:
    return ", ".join(f"`{field.name}`" for field in dataclasses.fields(get_origin(result) or result))


class Page:
    """What was said."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**os.environ, **environment, "COLUMNS": "118", "NO_COLOR": "1"}
        self.lines = [head()]

    def add(self, *lines: str) -> None:
        """Text of the page's own."""
        self.lines += lines

    def run(self, *commands: str, exits: int | Sequence[int] = 0, timed: bool = False, **environment: str) -> None:
        """Run commands one after the other and show them in one box.

        Args:
            exits: the exit code of each command, or of all.

        Raises:
            SystemExit: a command ended with another exit code, so the page would show a failure as normal.
        """
        self.add("", "```")
        for command, code in zip(commands, [exits] * len(commands) if isinstance(exits, int) else exits, strict=True):
            started_at = time.monotonic()
            answer = subprocess.run(
                [KVTIERS, *command.split()], cwd=WORK, env=self._environment | environment,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            if answer.returncode != code:
                raise SystemExit(f"kvtiers {command}: exit code {answer.returncode}, not {code}:\n{answer.stdout}")
            took = f" after {time.monotonic() - started_at:.1f} s" if timed else ""
            ended = [f"[exit code {code}{took}]"] if code else []
            variables = "".join(f"{name}={value} " for name, value in environment.items())
            self.add(
                f"$ {variables}kvtiers {command}",
                *(line.rstrip() for line in answer.stdout.rstrip().split("\n")),
                *ended,
                "",
            )
        self.lines[-1] = "```"

    def key_of_a_block(self, config: str) -> str:
        """The name of a block in a deployment, which is not shown."""
        command = [KVTIERS, "ls", config, "--sort", "name", "--limit", "1", "--json"]
        done = subprocess.run(command, cwd=WORK, env=self._environment, capture_output=True, text=True, check=True)
        key: str = json.loads(done.stdout.splitlines()[0])["key"]
        return key


def main() -> None:
    """Command line."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, WORK)
        server = stack.enter_context(seaweed_server())
        before = {name: os.environ.get(name) for name in server.s3.environment}
        os.environ.update(server.s3.environment)
        stack.callback(lambda: [os.environ.pop(name) for name, value in before.items() if value is None])
        server.s3.client().create_bucket(Bucket=BUCKET)
        tiers = tiers_of(server)
        files = {"fs": ["files"], "s3": ["bucket"], "memory": ["ram"], "two": ["near", "far"]}
        for name, used in files.items():
            content = {"region": {"size": "64MiB"}, "tiers": [tiers[one] for one in used]}
            (WORK / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        for name in ("files", "bucket"):
            fill(tiers[name])
        spoil(server)
        time.sleep(1)
        page = Page(server.s3.environment)
        for title, name in (("A folder", "fs"), ("A bucket", "s3"), ("A memory tier", "memory")):
            config = f"{name}.yaml"
            page.add("", f"## {title}", "", "```yaml", (WORK / config).read_text().rstrip(), "```")
            page.run(f"check {config}")
            page.run(f"check {config} --write")
            outlives = 2 if name == "memory" else 0
            page.run(f"du {config}", f"ls {config} --limit 2", f"ls {config} --limit 1 --json", exits=outlives)
            if name != "memory":
                block = page.key_of_a_block(config)
                is_bad = int(name == "s3")  # the block that was spoilt is the first one there
                namespace = block.partition("_r0/")[0]
                page.run(f"show {config} {block}", f"show {config} {namespace}", exits=(is_bad, 0))
                repair = f"verify {config} --repair"
                page.run(f"verify {config}", f"{repair} --dry-run", repair, exits=(1, 1, 0))
                page.run(f"verify {config}", f"verify {config} --subset 5%")
            page.run(f"gc {config} --dry-run", f"gc {config}", f"du {config} --json", exits=outlives)
            if name == "memory":
                page.run(f"bench {config} --total 32MiB")
            page.run(f"vllm-config {config} --way tier")
        page.add("", "## A bucket that cannot be reached")
        for name, mistake in (
            ("endpoint", {"endpoint_url": "http://127.0.0.1:9"}),
            ("no-such-host", {"endpoint_url": "https://s3.invalid"}),
            ("no-such-bucket", {"bucket": "kvtier"}),
        ):
            content = {"region": {"size": "64MiB"}, "tiers": [tiers["far"] | mistake]}
            (WORK / f"{name}.yaml").write_text(yaml.safe_dump(content))
            page.run(f"check {name}.yaml", exits=1, timed=True)
        page.run("check s3.yaml", exits=1, timed=True, AWS_SECRET_ACCESS_KEY="not-the-secret")
        page.add("", "## Between tiers", "", "```yaml", (WORK / "two.yaml").read_text().rstrip(), "```")
        page.run("copy fs.yaml two.yaml --to far --dry-run", "copy fs.yaml two.yaml --to far")
        fill_near = "copy two.yaml --from far --to near --until-full"
        page.run(
            f"{fill_near} --limit-rate 4MiB", fill_near, "copy two.yaml", "copy fs.yaml", "warm two.yaml",
            exits=(0, 0, 2, 2, 2),
        )  # fmt: skip
        page.run("bench two.yaml --total 32MiB")
        page.run("copy memory.yaml", "copy two.yaml memory.yaml --from far", exits=2)
        (WORK / "config.json").write_text(json.dumps(LLAMA_8B))
        page.add("", "## A model's size", "", "`config.json` is that of Llama 3.1 8B.")
        page.run("check --model config.json --tp 2 --prefill 5000")
        page.add("", "## Why requests were not loaded", "", "`requests.jsonl` is what `trace_requests` names.")
        lines = [cause(WORK / cause.__name__) for cause in (all_is_found, another_engine_stored_it_with_another_layout)]
        lines += [cause(WORK / cause.__name__) for cause in (storage_is_full, block_outlives_its_ttl)]
        records = [json.loads(line) | {"request": f"request-{number}"} for number, line in enumerate(lines, 1)]
        (WORK / "requests.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        page.run("explain requests.jsonl", "explain requests.jsonl --request request-2 --json")
        page.run("explain http://127.0.0.1:9/metrics", exits=1)
        page.add("", "## Without a YAML file")
        bucket = f"s3://{BUCKET}/two"
        near = str(WORK / "near")
        listing = (f"du {bucket}", f"ls {bucket} --sort age --limit 2")
        page.run(*listing, AWS_ENDPOINT_URL=str(server.s3.endpoint_url))
        page.run(f"gc {near}", f"gc {near} --max-bytes 4MiB", exits=(2, 0))
        remove = f"rm {near} --model {MODEL}"
        page.run(f"{remove} --dry-run", remove, f"{remove} --yes", exits=(0, 2, 0))
        page.run(f"show {near} no-such-name --json", f"du {near}", exits=(2, 0))
        page.run("--version", "bench two.yaml --total 10", exits=(0, 2))
    PAGE.write_text("\n".join(page.lines) + "\n")


if __name__ == "__main__":
    main()

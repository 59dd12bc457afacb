"""The command line, ``kvtiers …``."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from kvtiers.connector.commands import copy, storage
from kvtiers.connector.commands.bench import bench
from kvtiers.connector.commands.check import check
from kvtiers.connector.commands.places import EXIT_BAD_INPUT, EXIT_FAILED, make_console, refuse
from kvtiers.connector.commands.size import size
from kvtiers.connector.commands.verify import verify
from kvtiers.tiers.config.deployment import load_config
from kvtiers.tiers.errors import KVTiersError
from kvtiers.tiers.registry import SecondaryTierFactory

app = typer.Typer(help="KV-cache tiers for LLM servers.", no_args_is_help=True, pretty_exceptions_enable=False)
for command in (storage.ls, storage.du, storage.gc, verify, copy.warm, copy.migrate, bench, check, size):
    app.command()(command)


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="Path or hub id of a causal language model.")] = None,
    prompt: Annotated[Path | None, typer.Option(help="Text file to use as the prompt.")] = None,
    question: Annotated[str | None, typer.Option(help="The question to ask about the text.")] = None,
    config: Annotated[Path | None, typer.Option(help="The deployment's YAML file; its tiers are used.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the measurements to this file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens to generate.")] = 24,
    root: Annotated[Path | None, typer.Option(help="Keep the stored blocks in this folder.")] = None,
    another_replica: Annotated[
        bool,
        typer.Option("--another-replica", help="Give the second process an empty folder for its first tier."),
    ] = False,
) -> None:
    """Answer a long prompt in two processes: the first computes it, the second loads its KV cache from storage."""
    from kvtiers.connector.demo.run import DemoOptions, run_demo

    options = DemoOptions(
        model=model,
        prompt_file=prompt,
        question=question,
        config_file=config,
        json_file=json_file,
        max_new_tokens=max_new_tokens,
        root_dir=root,
        another_replica=another_replica,
    )
    try:
        code = run_demo(options)
    except KVTiersError as e:
        raise refuse("demo", str(e)) from e
    raise typer.Exit(code)


@app.command("vllm-config")
def vllm_config(
    config: Annotated[Path, typer.Argument(help="The YAML file.")],
    way: Annotated[
        str | None, typer.Option(help="Print only this way, on one line: spec, tier or shared_storage.")
    ] = None,
) -> None:
    """Print vLLM's --kv-transfer-config for a deployment, for each way to connect kvtiers to vLLM."""
    from kvtiers.connector.vllm_config import vllm_config as make
    from kvtiers.connector.vllm_config import why_not

    try:
        ways = make(config)
    except KVTiersError as e:
        raise refuse("vllm-config", str(e)) from e
    if way is None:
        print(json.dumps(ways, indent=2))
    elif way in ways:
        print(json.dumps(ways[way]))
    elif way in ("spec", "shared_storage"):
        raise typer.BadParameter(f"this file does not support {way}: {why_not(way, config)}", param_hint="--way")
    else:
        raise typer.BadParameter(f"{way!r} is not one of {', '.join(ways)} for this file", param_hint="--way")


@app.command()
def doctor(
    config: Annotated[Path, typer.Argument(help="The YAML file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Test whether this machine and its storage meet a deployment's needs, and print a fix for each problem.

    Creates the root folders as an engine would, and writes and removes small blobs in each tier.
    """
    from kvtiers.connector.commands.doctor import examine, show

    try:
        findings = examine(load_config(config, SecondaryTierFactory.tier_types()))
    except KVTiersError as e:
        raise refuse("doctor", str(e)) from e
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        show(findings, make_console())
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(EXIT_FAILED)


@app.command("serve-metrics")
def serve_metrics(
    config: Annotated[Path, typer.Argument(help="The YAML file.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on; 0 picks a free port.")] = 9471,
    address: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    probe_every: Annotated[float, typer.Option(min=0.1, help="Seconds between probes of each tier.")] = 15.0,
    scan_every: Annotated[
        float, typer.Option(min=0, help="Seconds between scans, which list every block; 0: never.")
    ] = 3600.0,
) -> None:
    """Serve Prometheus metrics of the tiers' storage, without an engine: availability, latency, usage.

    For hits, circuits and verify failures, which only the engines count, set metrics.port in the configuration.
    """
    from kvtiers.connector.commands import monitor as storage_monitor

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        storage_monitor.serve_metrics(
            load_config(config, SecondaryTierFactory.tier_types()),
            port=port,
            address=address,
            probe_every_s=probe_every,
            scan_every_s=scan_every,
            stop=stop,
            started=lambda url: print(f"metrics are served on {url}", flush=True),
        )
    except KVTiersError as e:
        raise refuse("serve-metrics", str(e)) from e


def main() -> None:
    """Entry point of the ``kvtiers`` command."""
    if sys.stdout is None:  # started with >&-; otherwise the next opened file would get descriptor 1
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - stays open until the process ends
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):  # of stdout: storage errors arrive as StoreError
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes stdout again at exit
        print(f"kvtiers: the output could not be written: {e.strerror}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()

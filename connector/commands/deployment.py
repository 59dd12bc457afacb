"""``kvtiers demo``, ``vllm-config``, ``doctor`` and ``serve-metrics``: commands for a deployment as a whole."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from kvtiers.connector.commands.options import AsJson, duration_option
from kvtiers.connector.commands.output import answer, make_console
from kvtiers.connector.commands.places import load_deployment
from kvtiers.connector.commands.session import ExitCode, session
from kvtiers.tiers.config.deployment import load_named
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.registry import SecondaryTierFactory

YamlFile = Annotated[Path, typer.Argument(help="The YAML file.", show_default=False)]


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
    session().if_interrupted = lambda: "run it again to start over"
    raise typer.Exit(run_demo(options))


def vllm_config(
    config: YamlFile,
    way: Annotated[
        str | None, typer.Option(help="Print only this way, on one line: spec, tier or shared_storage.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON document with all ways, or with the way of --way.")
    ] = False,
) -> None:
    """Print vLLM's --kv-transfer-config for a deployment, for each way to connect kvtiers to vLLM."""
    from kvtiers.connector.vllm_config import vllm_config as make
    from kvtiers.connector.vllm_config import why_not

    for index, tier in enumerate(load_named(config, SecondaryTierFactory.tier_types()).tiers):
        if getattr(tier, "embedded", False):
            raise ConfigError(
                "starts a server that only kvtiers demo has; give an endpoint_url instead",
                field=f"tiers[{index}].embedded",
            )
    ways = make(config)
    if way is not None and way not in ways:
        if way in ("spec", "shared_storage"):
            raise typer.BadParameter(f"this file does not support {way}: {why_not(way, config)}", param_hint="--way")
        raise typer.BadParameter(f"{way!r} is not one of {', '.join(ways)} for this file", param_hint="--way")
    if as_json:
        answer({"ways": ways if way is None else {way: ways[way]}})
    elif way is None:
        print(json.dumps(ways, indent=2))
    else:
        print(json.dumps(ways[way]))


def doctor(config: YamlFile, as_json: AsJson = False) -> None:
    """Test whether this machine and its storage meet a deployment's needs, and print a fix for each problem.

    Creates the root folders as an engine would, and writes and removes small blobs in each tier.
    """
    from kvtiers.connector.commands.doctor import examine, show
    from kvtiers.connector.commands.doctor_storage import PROBE_FOLDER

    session().if_interrupted = lambda: f"a test blob of 4 KiB may be left below {PROBE_FOLDER} in a tier; run it again"
    findings = examine(load_named(config, SecondaryTierFactory.tier_types()))
    failed = any(finding.level == "problem" for finding in findings)
    if as_json:
        answer({"findings": [dataclasses.asdict(finding) for finding in findings]}, ok=not failed)
    else:
        show(findings, make_console())
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def serve_metrics(
    config: Annotated[
        str,
        typer.Argument(help="YAML file of the deployment, or only a folder or URL with blocks.", show_default=False),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on; 0 picks a free port.")] = 9471,
    address: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    probe_every: Annotated[str, typer.Option(help="Time between probes of each tier, 100ms or more.")] = "15s",
    scan_every: Annotated[str, typer.Option(help="Time between scans, which list every block; 0: never.")] = "1h",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the URL as JSON when the server is ready.")
    ] = False,
) -> None:  # fmt: skip
    """Serve Prometheus metrics of the tiers' storage, without an engine: availability, latency, usage.

    For hits, circuits and verify failures, which only the engines count, set metrics.port in the configuration.
    Ends with exit code 0 on Ctrl-C and SIGTERM.
    """
    from kvtiers.connector.commands import monitor as storage_monitor

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def started(url: str) -> None:
        answer({"url": url}) if as_json else print(f"metrics are served on {url}")
        print(end="", flush=True)

    storage_monitor.serve_metrics(
        load_deployment(config),
        port=port,
        address=address,
        probe_every_s=duration_option("--probe-every", probe_every, least_s=0.1),
        scan_every_s=duration_option("--scan-every", scan_every),
        stop=stop,
        started=started,
    )

"""``kvtiers demo`` and ``vllm-config``: commands for a deployment as a whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ...tiers.config.deployment import load_named
from ...tiers.registry import SecondaryTierFactory
from .options import YamlFile
from .output import answer
from .session import session


def demo(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder or hub id of a causal language model. Default: SmolLM2-135M."),
    ] = None,
    prompt: Annotated[Path | None, typer.Option(metavar="FILE", help="Text file to use as the prompt.")] = None,
    question: Annotated[str | None, typer.Option(metavar="TEXT", help="The question to ask about the prompt.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="CONFIG", help="Use the tiers of this YAML file.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the measurements to this file.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="Tokens to generate.")] = 24,
    root: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep the stored blocks in this folder.")] = None,
    another_replica: Annotated[
        bool,
        typer.Option("--another-replica", help="Give the second process an empty folder for its first tier."),
    ] = False,
) -> None:
    """Answer a long prompt in two processes: the first computes it, the second loads its KV cache from storage."""
    from ..demo.run import DemoOptions, run_demo

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


@dataclass(frozen=True, slots=True)
class Ways:
    """Way -> value of ``--kv-transfer-config``."""

    ways: dict[str, dict[str, Any]]


def vllm_config(
    config: YamlFile,
    way: Annotated[
        str | None,
        typer.Option(metavar="WAY", help="Print only this way, on one line: spec, tier or shared_storage."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON document with all ways, or with the way of --way.")
    ] = False,
) -> None:
    """Print vLLM's --kv-transfer-config for a deployment, for each way to connect kvtiers to vLLM."""
    from ..vllm_config import vllm_config as make
    from ..vllm_config import why_not_shared

    load_named(config, SecondaryTierFactory.tier_types())
    ways = make(config)
    if way is not None and way not in ways:
        if way == "shared_storage":
            raise typer.BadParameter(f"this file does not support {way}: {why_not_shared(config)}", param_hint="--way")
        raise typer.BadParameter(f"{way!r} is not one of {', '.join(ways)} for this file", param_hint="--way")
    if as_json:
        answer(Ways(ways if way is None else {way: ways[way]}))
    elif way is None:
        print(json.dumps(ways, indent=2))
    else:
        print(json.dumps(ways[way]))

"""python -m tests.soak [--seconds N] [--json FILE]: exit status 0, or 1 where anything happened that must not."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path

from rich.console import Console

from tests.soak.run import SABOTAGES, SoakOptions, run_soak


def main() -> int:
    """Parse arguments, run, print."""
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--faults", type=float, default=0.05, help="part of the calls that fail")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tiers", default="fs,nfs,s3")
    parser.add_argument("--heal-s", type=float, default=30.0, help="by when everything must be free after the faults")
    parser.add_argument("--sabotage", choices=SABOTAGES, help="break a promise on purpose, to see it reported")
    parser.add_argument("--no-fuse", action="store_true", help="files in folders, as where there is no FUSE")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)  # what the tiers say of each fault is not news here
    console = Console(width=None if os.isatty(1) else 140)
    options = SoakOptions(
        seconds=args.seconds,
        share=args.faults,
        seed=args.seed,
        heal_s_max=args.heal_s,
        tiers=args.tiers.split(","),
        fuse=not args.no_fuse,
        sabotage=args.sabotage,
    )
    if console.is_terminal:
        with console.status("starting") as status:
            report = run_soak(options, status.update)
    else:
        report = run_soak(options)
    report.print(console)
    if args.json is not None:
        args.json.write_text(json.dumps(report.as_json(), indent=1))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())

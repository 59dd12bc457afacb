"""The workers of a host that has no scheduler: ``vllm serve --headless``, which needs metadata as ``server`` says.

python -m tests.e2e.headless --nnodes 2 --node-rank 1 …
"""

from __future__ import annotations


def main() -> None:
    """Command line: that of ``vllm serve``."""
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = serve.make_arg_parser(FlexibleArgumentParser()).parse_args()
    arguments.headless, arguments.api_server_count = True, 1
    serve.run_headless(arguments)


if __name__ == "__main__":
    main()

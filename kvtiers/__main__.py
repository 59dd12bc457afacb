"""The program ``kvtiers``, also ``python -m kvtiers``: starts the command line."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line. Ctrl-C while its modules are imported ends the process at once, without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as it is for a command that a script runs in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvtiers.connector.commands import cli

    signal.signal(signal.SIGINT, before)
    cli.main()


if __name__ == "__main__":
    main()

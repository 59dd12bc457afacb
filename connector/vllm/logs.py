"""kvtiers' log lines inside vLLM: on vLLM's handlers, at vLLM's level.

vLLM configures the logger ``vllm`` and no other. Without this, INFO lines of kvtiers would be lost, and its warnings
would have no time, level or process.
"""

from __future__ import annotations

import logging


def log_as_vllm() -> None:
    """Configure kvtiers' logger as vLLM's logger is configured in this process. May be called again.

    If kvtiers' logger has handlers, or ``propagate`` off, it is left as it is: whoever runs the engine configured it,
    for instance with ``VLLM_LOGGING_CONFIG_PATH``. Its own level counts more than vLLM's. Where vLLM's logger has no
    handlers (``VLLM_CONFIGURE_LOGGING=0``), kvtiers' lines go to the root logger, as vLLM's do.
    """
    theirs = logging.getLogger("vllm")
    ours = logging.getLogger("kvtiers")
    if ours.handlers or not ours.propagate:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.propagate = theirs.propagate
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)

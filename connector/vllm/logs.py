"""Sends kvtiers' log lines to vLLM's handlers, at vLLM's level.

vLLM configures only the logger ``vllm``. Without this module, kvtiers' INFO lines would be lost, and its warnings would
have no time, level or process.
"""

from __future__ import annotations

import logging


def log_as_vllm() -> None:
    """Configure kvtiers' logger like vLLM's logger in this process. May be called repeatedly.

    - If kvtiers' logger has handlers or does not propagate, it stays unchanged: the operator configured it, for
      instance with ``VLLM_LOGGING_CONFIG_PATH``.
    - If kvtiers' logger has a level, it keeps it.
    - If vLLM's logger has no handlers (``VLLM_CONFIGURE_LOGGING=0``), kvtiers logs to the root logger, as vLLM does.
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

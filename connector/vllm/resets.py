"""What becomes of storage when vLLM resets its connector.

vLLM does so when weights may have been changed in place, and tells neither whether they were nor what they are now. The
identity under which blocks are stored is that of the weights which the engine was started with. So from a reset on,
what storage holds may be another model's KV, and what is computed may not be stored under this name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiers.errors import ConfigError
from tiers.plain_logs import get_logger

logger = get_logger(__name__)

_OPTION = "storage_after_reset"
_ACCEPTED = ("off", "keep")


class StorageSwitch:
    """Whether an engine uses its storage. Scheduler thread only.

    Args:
        extra_config: of the connector; has ``storage_after_reset``, ``off`` (the default) or ``keep``.

    Raises:
        ConfigError: says what is accepted.

    Attributes:
        is_off: from a reset on, unless storage is kept.
    """

    def __init__(self, extra_config: Mapping[str, Any]) -> None:
        chosen = extra_config.get(_OPTION, _ACCEPTED[0])
        if chosen is False:  # what YAML 1.1 makes of off
            chosen = "off"
        if chosen not in _ACCEPTED:
            raise ConfigError(f"{chosen!r} is not accepted; write {' or '.join(_ACCEPTED)}", field=_OPTION)
        self._keeps = chosen == "keep"
        self.is_off = False

    def reset(self) -> None:
        """To be called when vLLM resets its connector."""
        if self._keeps or self.is_off:
            return
        self.is_off = True
        logger.warning(
            "vLLM has reset its connector, as it does when weights are changed in place, and to sleep or pause: what "
            "storage holds is KV of the weights before, so from here on nothing is loaded from there or stored; an "
            "engine that is started again uses it again. Where weights stay the same, write %r: 'keep'",
            _OPTION,
        )

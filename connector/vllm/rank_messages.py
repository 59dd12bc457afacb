"""Messages between the scheduler's and the workers' sides of RankTiersSpec, sent with vLLM's own messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

from ...tiers.blocks.keys import OffloadKey
from .contract import implements

_K = TypeVar("_K")


@dataclass
class RankKeys(LoadStoreSpec):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """The scheduler's message to the ranks for a transfer.

    Attributes:
        keys: the blocks' keys in the ranks' tiers, in the order of the transfer.
        req_id: the request.
        resets: see ``RankStep``.
    """

    keys: list[OffloadKey]
    req_id: str
    resets: int


@implements
@dataclass
class RankStep(OffloadingConnectorMetadata):  # type: ignore[misc]  # as above
    """The scheduler's message to the ranks in each step.

    vLLM's workers queue stores for a step, and do not empty the queue when the engine resets its cache. By the next
    step the KV blocks may be overwritten. So a rank ends the stores of earlier resets as lost.

    Attributes:
        resets: how often the engine has reset its cache.
        uses: stored blocks that requests found in the GPU's cache. They count as used, so a tier's limits remove
            other blocks first.
        late: requests whose loads take too long, so the ranks must end them.
    """

    resets: int = 0
    uses: list[OffloadKey] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


@implements
@dataclass
class RankReport(OffloadingWorkerMetadata):  # type: ignore[misc]  # as above
    """The ranks' report to the scheduler, with the report of vLLM's connector.

    Attributes:
        stored: key -> bit mask of the ranks that stored it.
        lost: see ``RankBlocks.note``.
        failed: requests of which a rank did not load all blocks.
        revisions: revision of a model -> bit mask of the ranks that have it. Only in a rank's first report.
    """

    stored: dict[OffloadKey, int] = field(default_factory=dict)
    lost: set[OffloadKey] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    revisions: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: Any) -> Any:
        """Add the report of another rank."""
        theirs = vars(other)  # to vLLM, it is a report of any connector
        return report_of(
            super().aggregate(other),
            stored=_merged(self.stored, theirs["stored"]),
            lost=self.lost | theirs["lost"],
            failed=self.failed | theirs["failed"],
            revisions=_merged(self.revisions, theirs["revisions"]),
        )


def _merged(ranks: Mapping[_K, int], others: Mapping[_K, int]) -> dict[_K, int]:
    return {**ranks, **{key: ranks.get(key, 0) | bits for key, bits in others.items()}}


def report_of(meta: Any, **news: Any) -> RankReport | None:
    """Add the fields of a ``RankReport`` to vLLM's own report. None: both are empty."""
    if meta is None and not any(news.values()):
        return None
    theirs = fields_of(meta) if meta is not None else {}
    return RankReport(**theirs | news)


def fields_of(meta: Any) -> dict[str, Any]:
    """Return the fields of a dataclass of vLLM's, each with its value as it is."""
    return {each.name: getattr(meta, each.name) for each in dataclasses.fields(meta)}

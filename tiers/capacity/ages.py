"""AgeHistogram: finds the age of the oldest blocks, in constant memory."""

from __future__ import annotations

from bisect import bisect_right

AGE_S_MIN = 1e-3
BUCKETS_PER_OCTAVE = 64  # ages in one bucket differ by at most 1.1 %
#: Smallest age in each bucket after the first bucket: 1 ms to 34 years.
EDGES_S = [AGE_S_MIN * 2 ** (step / BUCKETS_PER_OCTAVE) for step in range(40 * BUCKETS_PER_OCTAVE)]


class AgeHistogram:
    """Bytes of blocks by age, in buckets whose width grows with the age. Negative ages fall into the first bucket."""

    def __init__(self) -> None:
        self._bytes = [0] * (len(EDGES_S) + 1)
        self._blobs = 0

    @property
    def blobs(self) -> int:
        """Number of blocks."""
        return self._blobs

    def add(self, age_s: float, size: int) -> None:
        """Count a block."""
        self._bytes[bisect_right(EDGES_S, age_s)] += size
        self._blobs += 1

    def add_all(self, other: AgeHistogram) -> None:
        """Count another histogram's blocks."""
        self._bytes = [mine + theirs for mine, theirs in zip(self._bytes, other._bytes, strict=True)]
        self._blobs += other._blobs

    def age_of_oldest(self, share: float) -> float:
        """Return the age such that blocks this old hold ``share`` of all bytes, or a bucket more. Infinite for 0."""
        wanted = share * sum(self._bytes)
        if wanted <= 0:
            return float("inf")
        for bucket in range(len(EDGES_S), 0, -1):
            wanted -= self._bytes[bucket]
            if wanted <= 0:
                return EDGES_S[bucket - 1]
        # Blocks of the first bucket (timestamps in the future) count as old only if all blocks are in this bucket.
        return EDGES_S[0] if any(self._bytes[1:]) else float("-inf")

"""AgeHistogram: bytes by age, in constant memory."""

from __future__ import annotations

from math import log2

AGE_S_MIN = 1e-3
BUCKETS_PER_OCTAVE = 64  # ages in one bucket differ by at most 1.1 %
BUCKETS = 40 * BUCKETS_PER_OCTAVE + 1  # 1 ms to 34 years


class AgeHistogram:
    """Bytes by age, in buckets whose width grows with the age."""

    def __init__(self) -> None:
        self._bytes = [0] * BUCKETS
        self.total_bytes = 0

    def add(self, age_s: float, size: int) -> None:
        """Count a blob."""
        self._bytes[bucket_of(age_s)] += size
        self.total_bytes += size

    def cut(self, bytes_wanted: int) -> tuple[int, int]:
        """Find the age beyond which blobs have the wanted bytes in total.

        Returns:
            (bucket, bytes): remove all blobs in older buckets, and this many bytes of the bucket itself.
        """
        left = bytes_wanted
        for bucket in range(BUCKETS - 1, -1, -1):
            if left <= self._bytes[bucket]:
                return bucket, max(0, left)
            left -= self._bytes[bucket]
        return -1, 0


def bucket_of(age_s: float) -> int:
    """The bucket of an age. Negative ages (timestamps in the future) fall into the first bucket."""
    if age_s <= AGE_S_MIN:
        return 0
    bucket = 1 + int(log2(age_s / AGE_S_MIN) * BUCKETS_PER_OCTAVE)
    return bucket if bucket < BUCKETS else BUCKETS - 1

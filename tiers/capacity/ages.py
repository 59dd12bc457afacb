"""Ages: how old blobs were when a run began, and which of them are the oldest, in constant memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

AGE_S_MIN = 1e-3
BUCKETS_PER_OCTAVE = 64  # ages in one bucket differ by at most 1.1 %
#: Least age of each bucket but the first: 1 ms to 34 years.
EDGES_S = [AGE_S_MIN * 2 ** (step / BUCKETS_PER_OCTAVE) for step in range(40 * BUCKETS_PER_OCTAVE)]
STAMP_S = 1.0  # S3 and some file systems truncate times to seconds, also the time at which the run began


class Ages:
    """Ages at the beginning of a run, which is when this object is made.

    Args:
        now: Unix seconds of the storage's clock.
        monotonic: seconds.
    """

    def __init__(self, now: float, monotonic: Callable[[], float]) -> None:
        self.now = now
        self.began_at = monotonic()
        self._monotonic = monotonic

    def age_s(self, mtime: float) -> float:
        """A blob's age: negative if a clock was ahead, 0 if it was stored or used since the run began."""
        age_s = self.now - mtime
        if age_s >= 0.0:
            return age_s
        passed_s = self._monotonic() - self.began_at + STAMP_S
        return 0.0 if age_s >= -passed_s else age_s


@dataclass(slots=True)
class Cut:
    """The oldest blobs of a histogram: all in buckets beyond ``bucket``, and ``bytes_left`` bytes of that bucket."""

    bucket: int
    bytes_left: int

    @property
    def age_s_min(self) -> float:
        """Younger blobs are not among them."""
        return EDGES_S[self.bucket - 1] if self.bucket > 0 else float("-inf")

    def takes(self, age_s: float, size: int) -> bool:
        """Whether a blob is one of them. To be asked once for each blob."""
        bucket = bucket_of(age_s)
        if bucket != self.bucket:
            return bucket > self.bucket
        self.bytes_left -= size
        return self.bytes_left > -size


class AgeHistogram:
    """Blobs and their bytes by age, in buckets whose width grows with the age."""

    def __init__(self) -> None:
        self._bytes = [0] * (len(EDGES_S) + 1)
        self._blobs = [0] * (len(EDGES_S) + 1)

    def add(self, age_s: float, size: int) -> None:
        """Count a blob."""
        bucket = bisect_right(EDGES_S, age_s)  # bucket_of, inlined: this is called for every blob
        self._bytes[bucket] += size
        self._blobs[bucket] += 1

    def cut(self, bytes_wanted: int) -> Cut:
        """The oldest blobs that have the wanted bytes in total."""
        left = bytes_wanted
        for bucket in range(len(EDGES_S), -1, -1):
            if left <= self._bytes[bucket]:
                return Cut(bucket, max(0, left))
            left -= self._bytes[bucket]
        return Cut(-1, 0)

    def oldest(self, bytes_wanted: int) -> tuple[int, int]:
        """How many blobs, and bytes, the cut takes. Blobs of the cut's own bucket count with their mean size."""
        cut = self.cut(bytes_wanted)
        blobs, size = sum(self._blobs[cut.bucket + 1 :]), sum(self._bytes[cut.bucket + 1 :])
        if cut.bytes_left:
            within, bytes_within = self._blobs[cut.bucket], self._bytes[cut.bucket]
            taken = -(-cut.bytes_left * within // bytes_within)
            return blobs + taken, size + taken * bytes_within // within
        return blobs, size


def bucket_of(age_s: float) -> int:
    """The bucket of an age. Negative ages (timestamps in the future) fall into the first bucket."""
    return bisect_right(EDGES_S, age_s)

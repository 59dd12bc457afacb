"""Damages stored blocks, one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tests.files import files_below


def damaged(root: Path, times: int, seed: int) -> Iterator[str]:
    """Damage one stored block at a time: flip a bit, cut, lengthen, zero or swap it. Yields the block's file name.

    The caller loads the block and stores it again.
    """
    choices = random.Random(seed)
    files = sorted(path for path, _ in files_below(root) if path.suffix == ".bin")
    for _ in range(times):
        path = choices.choice(files)
        data = bytearray(path.read_bytes())
        match choices.randrange(5):
            case 0:
                data[choices.randrange(len(data))] ^= 1 << choices.randrange(8)
            case 1:
                del data[choices.randrange(len(data)) :]
            case 2:
                data += bytes(choices.randrange(1, 5000))
            case 3:
                at = choices.randrange(len(data))
                data[at : at + 512] = bytes(len(data[at : at + 512]))
            case _:
                data[:] = choices.choice([each for each in files if each != path]).read_bytes()
        if data != path.read_bytes():  # zeros may have been there
            path.write_bytes(data)
            yield path.name

"""Follows a listing from page to page, and ends it if the server does not move on.

The order of names proves nothing: S3's directory buckets, SeaweedFS and NAS systems that speak S3 list in an order of
their own. So every page has to begin with a name that no page before it began with. A bucket holds a finite number of
names, which bounds the number of pages, whatever tokens the server sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ...errors import StoreConfigError
from ...store import KeyInfo

#: Objects, names of folders, and the token of the next page ("": this page is the last).
Page = tuple[list[KeyInfo], list[str], str]

#: Pages in a row without a new name. A few are normal: a server may skip many deleted names in a page.
STALLED_PAGES_MAX: Final = 50


def follow(list_page: Callable[[str], Page], endpoint_url: str) -> Iterator[tuple[list[KeyInfo], list[str]]]:
    """Yield the objects and folders of each page, without names repeated in it or from the page before.

    Args:
        list_page: lists the page of a token; "" is the first page.
        endpoint_url: for the error message.

    Raises:
        StoreConfigError: the listing does not advance.
        StoreError: from ``list_page``.
    """
    firsts: set[str] = set()
    before: set[str] = set()
    stalled = 0
    token = ""
    while True:
        objects, folders, token = list_page(token)
        objects = list({info.key: info for info in objects if info.key not in before}.values())
        folders = [name for name in dict.fromkeys(folders) if name not in before]
        first = objects[0].key if objects else folders[0] if folders else None
        if first is None or first in firsts:
            stalled += 1
        else:
            stalled = 0
            firsts.add(first)
            before = {*(info.key for info in objects), *folders}
            yield objects, folders
        if not token:
            return
        if stalled == STALLED_PAGES_MAX:
            raise StoreConfigError(
                f"endpoint: {endpoint_url} does not end a listing: {STALLED_PAGES_MAX} pages in a row have no new name"
            )

"""Listings of servers that repeat pages, list names outside the prefix, or send entries that cannot be parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from kvtiers.tiers.errors import StoreConfigError
from kvtiers.tiers.stores.s3.listing import STALLED_PAGES_MAX
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from kvtiers.tiers.testing.tiny_s3 import Answer, Request, TinyS3
from tests.s3_clients import use_credentials

#: Makes the content of a listing's page from the number of the listing's requests before it.
Page = Callable[[int], str]


@pytest.fixture
def store(server: HttpFaultServer, boto_models_once: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    use_credentials(monkeypatch)
    options = S3Options(bucket="bucket", prefix="p", endpoint_url=server.endpoint_url, request_timeout_s=60.0)
    store = S3Store(options, sleep=lambda _: None)
    yield store
    store.close()


def entries(*names: str, size: str = "3", date: str = "2026-01-01T00:00:00Z") -> str:
    return "".join(
        f"<Contents><Key>{name}</Key><Size>{size}</Size><LastModified>{date}</LastModified></Contents>"
        for name in names
    )


def folders(*names: str) -> str:
    return "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in names)


def cut_off(token: object) -> str:
    return f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"


def names_of(store: S3Store, prefix: str = "") -> Iterator[str]:
    return (info.key for info in store.keys(prefix))


def answer_listings(monkeypatch: pytest.MonkeyPatch, page: Page) -> list[Request]:
    """Answer each listing's request with ``page``. Returns the list to which these requests are appended."""
    asked: list[Request] = []
    answer = TinyS3.answer

    def list_or_answer(self: TinyS3, request: Request) -> Answer:
        if "list-type" not in request.query:
            return answer(self, request)
        asked.append(request)
        content = f"<ListBucketResult><Name>bucket</Name>{page(len(asked) - 1)}</ListBucketResult>"
        return Answer(200, content.encode())

    monkeypatch.setattr(TinyS3, "answer", list_or_answer)
    return asked


ENDLESS: dict[str, Page] = {
    "same page with new tokens": lambda n: entries("p/a/b", "p/a/c") + cut_off(n),
    "two pages in turn": lambda n: entries(*(("p/a", "p/b"), ("p/c", "p/d"))[n % 2]) + cut_off(n),
    "two tokens in turn": lambda n: entries(f"p/{n % 2}") + cut_off(n % 2),
    "same page in another order": lambda n: entries(*(("p/a", "p/b"), ("p/b", "p/a"))[n % 2]) + cut_off(n),
    "duplicates in a page": lambda n: entries("p/a", "p/a") + cut_off(n),
    "no names": lambda n: cut_off(n),
    "folders": lambda n: folders("p/a/", "p/b/") + cut_off(n),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_listing_without_progress_ends_with_error(store: S3Store, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked = answer_listings(monkeypatch, ENDLESS[name])
    if name == "folders":
        with pytest.raises(StoreConfigError, match="does not end a listing"):
            store.folders()
    else:
        found: list[str] = []
        with pytest.raises(StoreConfigError, match="does not end a listing"):
            found.extend(names_of(store))
        assert len(found) == len(set(found)) <= 4
    assert len(asked) <= STALLED_PAGES_MAX + 2


def test_listing_with_progress_is_complete_in_any_order(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory bucket's order is its own; a gateway begins each page with the last name of the page before."""
    pages: Sequence[Sequence[str]] = [("p/c", "p/d"), ("p/d", "p/a"), (), ("p/a-b", "p/a/b"), ("p/b",)]

    def page(n: int) -> str:
        return entries(*pages[n]) + (cut_off(n) if n + 1 < len(pages) else "")

    answer_listings(monkeypatch, page)
    assert [*names_of(store)] == ["c", "d", "a", "a-b", "a/b", "b"]


def test_listing_with_few_pages_without_names_is_complete(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the listing of a versioned bucket in which many objects were deleted."""
    last = STALLED_PAGES_MAX - 1
    answer_listings(monkeypatch, lambda n: cut_off(n) if n < last else entries("p/a"))
    assert [*names_of(store)] == ["a"]


OTHERS: dict[str, str] = {
    "beside the prefix": entries("p/a", "q/a"),
    "prefix of a longer name": entries("pq/a"),
    "folder beside the prefix": folders("q/"),
    "folder without its delimiter": folders("p/a"),
    "no name": entries(""),
}


@pytest.mark.parametrize("name", OTHERS)
def test_listing_of_names_not_asked_for_is_refused(store: S3Store, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    answer_listings(monkeypatch, lambda _: OTHERS[name])
    for listing in (lambda: list(store.keys()), store.folders):
        with pytest.raises(StoreConfigError, match="lists names outside the requested prefix"):
            listing()


def test_listing_below_prefix_refuses_names_outside_the_prefix(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_listings(monkeypatch, lambda _: entries("p/a/1", "p/b/1"))
    with pytest.raises(StoreConfigError, match="lists names outside the requested prefix"):
        list(store.keys("a/"))


def test_listing_without_delimiter_support_is_refused(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_listings(monkeypatch, lambda _: entries("p/a/b/c"))
    with pytest.raises(StoreConfigError, match="lists names outside the requested prefix"):
        store.folders()
    assert [*names_of(store, "a/")] == ["a/b/c"]


def test_listing_of_prefix_without_keys_makes_no_request(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer_listings(monkeypatch, lambda _: entries("p/a"))
    assert list(store.keys("a//")) == list(store.keys("/")) == []
    assert asked == []


@pytest.mark.parametrize(
    "entry",
    [
        *(entries("p/a", size=size) for size in ("", "-1", "many", "1e3", "0x10", "&lt;3&gt;")),
        *(entries("p/a", date=date) for date in ("", "yesterday", "2026-13-01T00:00:00Z", "1e400")),
        "<Contents><Size>3</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>",
        "<Contents><Key>p/a</Key><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>",
        "<Contents><Key>p/a</Key><Size>3</Size></Contents>",
        "<Contents/>",
        "<CommonPrefixes/>",
    ],
)
def test_listing_with_unreadable_entry_error_names_endpoint_not_credentials(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    answer_listings(monkeypatch, lambda _: entry)
    with pytest.raises(StoreConfigError, match=r"^endpoint: ") as caught:
        list(store.keys())
    assert "credential" not in str(caught.value)
    assert "many" not in str(caught.value)

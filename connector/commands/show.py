"""``kvtiers show``: describes one block or one namespace."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from ...tiers.blocks.file_mapper import NAMESPACE, BlockName, parse_block_name
from ...tiers.blocks.keyring import show_key_id
from ...tiers.blocks.seal import TRAILER_BYTES, describe_trailer
from ...tiers.config.values import human_bytes
from ...tiers.errors import BlobNotFoundError, StoreError
from ...tiers.store import KeyInfo, Store
from ...tiers.tools.block_reader import BlockReader, read_identity
from ...tiers.tools.inventory import Share, list_blocks
from ...tiers.tools.namespaces import blocks_of, rank_folders
from ...tiers.tools.neighbors import Namespace, differing_fields, namespaces_in
from .options import AsJson, TierName
from .output import Ticker, complain, human_age, refuse, say
from .places import Place, find_places
from .results import Results, TierResult
from .session import CONFIG_VARIABLE
from .storage import utc

HASH_DIGITS_MIN = 5  # the digits that name a block's folders
FOUND_MAX = 20
VALUE_CHARS_MAX = 200
_NAMESPACE = re.compile(rf"({NAMESPACE})(?:_r[0-9]+)?/?")


@dataclass(slots=True)
class ShownBlock:
    """A block.

    Attributes:
        mtime: time of the last use or write, in Unix seconds.
        state: result of checking its seal.
        reason: why the block is not good; "": it is good.
        seal: the fields of its trailer; None: it cannot be read.
    """

    key: str
    namespace: str
    rank: int
    group: int
    hash: str
    bytes: int
    mtime: float
    state: Literal["good", "bad", "not_verified", "not_readable"]
    reason: str
    seal: dict[str, Any] | None
    kind: Literal["block"] = "block"


@dataclass(slots=True)
class Sibling:
    """Another namespace of the same model.

    Attributes:
        differs: field -> its values here and there, as JSON.
    """

    namespace: str
    differs: dict[str, tuple[str, str]]


@dataclass(slots=True)
class ShownNamespace:
    """A namespace.

    Attributes:
        oldest_mtime, newest_mtime: Unix seconds of its oldest and newest blocks; None: there are no blocks.
        identity: the content of its ``config.json``; None: missing or damaged.
    """

    namespace: str
    blocks: int
    bytes: int
    ranks: list[int]
    oldest_mtime: float | None
    newest_mtime: float | None
    identity: dict[str, Any] | None
    siblings: list[Sibling]
    kind: Literal["namespace"] = "namespace"


@dataclass(kw_only=True)
class Found(TierResult):
    """The block or namespace with a name, in a tier."""

    matches: list[ShownBlock | ShownNamespace]


def show(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="[CONFIG] NAME",
            show_default=False,
            help=f"YAML file, folder or URL (default: ${CONFIG_VARIABLE}), and the name of a namespace or block, or at "
            f"least the first {HASH_DIGITS_MIN} digits of a block's hash.",
        ),
    ],
    tier: TierName = None,
    as_json: AsJson = False,
) -> None:
    """Show a block (size, age, seal, whether it verifies) or a namespace (identity, differences from its siblings).

    Exits with 1 if no tier has it, or if a block is bad or cannot be read.
    """
    config, name = _arguments(what)
    results = Results[Found]()
    for place in find_places(config, tier):
        with results.of(place), place.open() as store:
            result = results.add(Found(tier=place.name, where=place.where, matches=_describe(store, name)))
            if not as_json:
                for one in result.matches:
                    _show(place, one)
    found = [one for result in results.done for one in result.matches]
    if not found:
        complain(f"no tier has {name!r}; du shows the namespaces, ls the blocks")
    is_bad = any(isinstance(one, ShownBlock) and one.state in ("bad", "not_readable") for one in found)
    results.end(as_json=as_json, failed=not found or is_bad)


def _arguments(what: list[str]) -> tuple[str, str]:
    default = os.environ.get(CONFIG_VARIABLE)
    if len(what) == 1 and default:
        return default, what[0]
    if len(what) != 2:
        raise refuse(f"give a configuration and one name; or one name, with ${CONFIG_VARIABLE} set")
    return what[0], what[1]


def _describe(store: Store, name: str) -> list[ShownBlock | ShownNamespace]:
    block = parse_block_name(name)
    if block is not None:
        found = [(info, block) for info in store.keys(name) if info.key == name]
    elif namespace := _NAMESPACE.fullmatch(name):
        return _describe_namespace(store, namespace[1])
    elif re.fullmatch(rf"[0-9a-f]{{{HASH_DIGITS_MIN},}}", name):
        found = _find_by_hash(store, name)
    else:
        raise refuse(
            f"{name!r} is not a name; accepted is a namespace (du), a block (ls), or {HASH_DIGITS_MIN} or more "
            "hexadecimal digits of a block's hash",
        )
    reader = BlockReader(store)
    return [_describe_block(reader, *one) for one in found]


def _find_by_hash(store: Store, digits: str) -> list[tuple[KeyInfo, BlockName]]:
    found = []
    for folder in rank_folders(store):
        for info, name in list_blocks(store, f"{folder}/{digits[:3]}/{digits[3:5]}_g"):
            if name.digits.startswith(digits):
                found.append((info, name))
                if len(found) == FOUND_MAX:
                    return found
    return found


def _describe_block(reader: BlockReader, info: KeyInfo, name: BlockName) -> ShownBlock:
    block = ShownBlock(
        info.key, name.namespace, name.rank, name.group, name.digits, info.size, info.mtime, "good", "", None
    )
    try:
        bad, is_foreign = reader.read(info, name)
        if len(reader.data) == info.size:
            block.seal = describe_trailer(reader.data[-TRAILER_BYTES:])
        if bad is not None:
            block.state, block.reason = "not_verified" if is_foreign else "bad", str(bad)
    except BlobNotFoundError:
        block.state, block.reason = "not_readable", "removed meanwhile"
    except StoreError as e:
        block.state, block.reason = "not_readable", str(e)
    return block


def _describe_namespace(store: Store, name: str) -> list[ShownBlock | ShownNamespace]:
    identity = read_identity(store, name)
    blocks = Share()
    ranks = set()
    times: list[float] = []  # the first and the last, once there are blocks
    with Ticker(f"listing {name}", unit="blocks") as ticker:
        for info in ticker.each(blocks_of(store, name)):
            blocks.add(info.size)
            block = parse_block_name(info.key)
            assert block is not None
            ranks.add(block.rank)
            times = [min([info.mtime, *times]), max([info.mtime, *times])]
    if identity is None and not blocks.blocks:
        return []
    own = None if identity is None else Namespace.of(name, identity)
    oldest, newest = times or (None, None)
    siblings = [] if own is None else _siblings(store, own)
    fields = None if own is None else own.fields
    return [ShownNamespace(name, blocks.blocks, blocks.bytes, sorted(ranks), oldest, newest, fields, siblings)]


def _siblings(store: Store, own: Namespace) -> list[Sibling]:
    others = [one for one in namespaces_in(store)[0] if one.model == own.model and one.name != own.name]
    return [
        Sibling(other.name, {field: (own.value(field), other.value(field)) for field in differing_fields((own, other))})
        for other in others
    ]


def _show(place: Place, found: ShownBlock | ShownNamespace) -> None:
    say(f"{found.kind} in {place.name} at {place.where}")
    for label, value in _block_rows(found) if isinstance(found, ShownBlock) else _namespace_rows(found):
        say(f"  {label:19} {value if len(value) <= VALUE_CHARS_MAX else f'{value[:VALUE_CHARS_MAX]}…'}")


def _block_rows(block: ShownBlock) -> list[tuple[str, str]]:
    rows = [
        ("name", block.key),
        ("namespace", f"{block.namespace}, rank {block.rank}, group {block.group}"),
        ("hash", block.hash),
        ("size", f"{human_bytes(block.bytes)} ({block.bytes:,} bytes)"),
        (
            "used or written",
            f"{human_age(time.time() - block.mtime)} ago, {utc(block.mtime)}" if block.mtime else "unknown",
        ),
        ("state", f"{block.state.replace('_', ' ')}{f' ({block.reason})' if block.reason else ''}"),
    ]
    seal = block.seal
    if seal is None:
        return [*rows, ("seal", "none that can be read")]
    protection = (
        "" if seal["authentication"] == "none" else f", {seal['authentication']} with key {show_key_id(seal['key_id'])}"
    )
    return [
        *rows,
        ("seal", f"version {seal['version']}, {seal['checksum']}{protection}"),
        ("payload", f"{human_bytes(seal['payload_bytes'])} ({seal['payload_bytes']:,} bytes)"),
        ("sealed", f"{utc(seal['written_at'])} by writer {seal['writer_id']}"),
        ("fingerprint", seal["fingerprint"]),
    ]


def _namespace_rows(found: ShownNamespace) -> list[tuple[str, str]]:
    rows = [
        ("name", found.namespace),
        ("blocks", f"{found.blocks:,}, {human_bytes(found.bytes)}, ranks {found.ranks}"),
    ]
    if found.oldest_mtime and found.newest_mtime:
        rows.append(("used or written", f"{utc(found.oldest_mtime)} to {utc(found.newest_mtime)}"))
    if found.identity is None:
        rows.append(("identity", "missing or damaged; an engine that uses the namespace writes it again"))
    else:
        rows += [(field, json.dumps(value, sort_keys=True)) for field, value in found.identity.items()]
    for sibling in found.siblings:
        rows.append(("sibling", sibling.namespace))
        rows += [(f"    {field}", f"{here} here, {there} there") for field, (here, there) in sibling.differs.items()]
    return rows

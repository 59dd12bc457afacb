"""``kvtiers show``: describes one block or one namespace."""

from __future__ import annotations

import json
import os
import re
import time
from typing import Annotated, Any

import typer

from ...tiers.blocks.file_mapper import NAMESPACE, BlockName, parse_block_name
from ...tiers.blocks.keyring import show_key_id
from ...tiers.blocks.seal import TRAILER_BYTES, describe_trailer
from ...tiers.errors import BlobNotFoundError, StoreError
from ...tiers.store import KeyInfo, Store
from ...tiers.tools.block_reader import BlockReader, read_identity
from ...tiers.tools.inventory import Share, list_blocks
from ...tiers.tools.namespaces import blocks_of, rank_folders
from ...tiers.tools.neighbors import Namespace, differing_fields, namespaces_in
from .options import AsJson, TierName
from .output import Results, Ticker, complain, human_age, human_bytes, refuse, say
from .places import Place, find_places
from .session import CONFIG_VARIABLE
from .storage import utc

HASH_DIGITS_MIN = 5  # the digits that name a block's folders
FOUND_MAX = 20
VALUE_CHARS_MAX = 200
_NAMESPACE = re.compile(rf"({NAMESPACE})(?:_r[0-9]+)?/?")


def show(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="[CONFIG] NAME",
            show_default=False,
            help=f"The configuration, folder or URL (default: ${CONFIG_VARIABLE}), and the name: of a namespace, of a "
            f"block, or the first {HASH_DIGITS_MIN} or more digits of a block's hash.",
        ),
    ],
    tier: TierName = None,
    as_json: AsJson = False,
) -> None:
    """Show a block (size, age, seal, whether it verifies) or a namespace (identity, differences from its siblings).

    Exits with 1 if no tier has it, or if a block is bad or cannot be read.
    """
    config, name = _arguments(what)
    results = Results()
    for place in find_places(config, tier):
        with results.of(place), place.open() as store:
            found = _describe(store, name)
            results.add({"found": found})
            if not as_json:
                for one in found:
                    _show(place, one)
    found = [one for result in results.all for one in result.get("found", ())]
    if not found:
        complain(f"no tier has {name!r}; du shows the namespaces, ls the blocks")
    results.end(
        as_json=as_json, failed=not found or any(one.get("verdict") in ("bad", "not readable") for one in found)
    )


def _arguments(what: list[str]) -> tuple[str, str]:
    default = os.environ.get(CONFIG_VARIABLE)
    if len(what) == 1 and default:
        return default, what[0]
    if len(what) != 2:
        raise refuse(f"give a configuration and one name; or one name, with ${CONFIG_VARIABLE} set")
    return what[0], what[1]


def _describe(store: Store, name: str) -> list[dict[str, Any]]:
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


def _describe_block(reader: BlockReader, info: KeyInfo, name: BlockName) -> dict[str, Any]:
    verdict, reason, seal = "good", "", None
    try:
        bad, is_foreign = reader.read(info, name)
        if len(reader.data) == info.size:
            seal = describe_trailer(reader.data[-TRAILER_BYTES:])
        if bad is not None:
            verdict, reason = "not verified" if is_foreign else "bad", str(bad)
    except BlobNotFoundError:
        verdict, reason = "not readable", "removed meanwhile"
    except StoreError as e:
        verdict, reason = "not readable", str(e)
    return {
        "kind": "block",
        "key": info.key,
        "namespace": name.namespace,
        "rank": name.rank,
        "group": name.group,
        "hash": name.digits,
        "size": info.size,
        "mtime": info.mtime,
        "verdict": verdict,
        "reason": reason,
        "seal": seal,
    }


def _describe_namespace(store: Store, name: str) -> list[dict[str, Any]]:
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
    if identity is None and not blocks.blobs:
        return []
    own = None if identity is None else Namespace.of(name, identity)
    return [
        {
            "kind": "namespace",
            "namespace": name,
            "blocks": blocks.blobs,
            "bytes": blocks.bytes,
            "ranks": sorted(ranks),
            "oldest": times[0] if times else None,
            "newest": times[1] if times else None,
            "identity": own.fields if own else None,
            "siblings": _siblings(store, own) if own else [],
        }
    ]


def _siblings(store: Store, own: Namespace) -> list[dict[str, Any]]:
    others = [one for one in namespaces_in(store)[0] if one.model == own.model and one.name != own.name]
    return [
        {
            "namespace": other.name,
            "differs": {field: [own.value(field), other.value(field)] for field in differing_fields((own, other))},
        }
        for other in others
    ]


def _show(place: Place, found: dict[str, Any]) -> None:
    say(f"{found['kind']} in {place.name} at {place.where}")
    for label, value in _block_rows(found) if found["kind"] == "block" else _namespace_rows(found):
        say(f"  {label:19} {value if len(value) <= VALUE_CHARS_MAX else f'{value[:VALUE_CHARS_MAX]}…'}")


def _block_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    mtime, seal = found["mtime"], found["seal"]
    age = f"{human_age(time.time() - mtime)} ago, {utc(mtime)}" if mtime else "unknown"
    verdict = f"{found['verdict']}{f' ({reason})' if (reason := found['reason']) else ''}"
    rows = [
        ("name", found["key"]),
        ("namespace", f"{found['namespace']}, rank {found['rank']}, group {found['group']}"),
        ("hash", found["hash"]),
        ("size", f"{human_bytes(found['size'])} ({found['size']:,} bytes)"),
        ("used or written", age),
        ("verdict", verdict),
    ]
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


def _namespace_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("name", found["namespace"]),
        ("blocks", f"{found['blocks']:,}, {human_bytes(found['bytes'])}, ranks {found['ranks']}"),
    ]
    if found["oldest"]:
        rows.append(("used or written", f"{utc(found['oldest'])} to {utc(found['newest'])}"))
    if found["identity"] is None:
        rows.append(("identity", "missing or damaged; an engine that uses the namespace writes it again"))
    else:
        rows += [(field, json.dumps(value, sort_keys=True)) for field, value in found["identity"].items()]
    for sibling in found["siblings"]:
        rows.append(("sibling", sibling["namespace"]))
        rows += [(f"    {field}", f"{here} here, {there} there") for field, (here, there) in sibling["differs"].items()]
    return rows

"""JSON schemas of what the commands print with ``--json``. ``kvtiers COMMAND --json-schema`` prints them.

Each command prints one document on one line, also after an error (then ``result`` may be null). ``ls`` prints a line
for each block before it. Later versions may add fields.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    return {"type": "object", "properties": required | (optional or {}), "required": sorted(required)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
COUNT_OR_NULL: Schema = {"type": ["integer", "null"], "minimum": 0}
NUMBER_OR_NULL: Schema = {"type": ["number", "null"]}
SHARE = _object({"blobs": COUNT, "bytes": COUNT})

_PLACE: Schema = {"tier": TEXT, "where": TEXT}


_LIFECYCLE: Schema = {"expire_after_days": COUNT_OR_NULL, "expire_versions": FLAG}  # of gc --lifecycle


def _tiers(result: Schema, *others: Schema, optional: Schema | None = None) -> Schema:
    """A result for each tier, or the tier's error. A tier may be skipped for a reason (``others``)."""
    failed = _object({**_PLACE, "error": TEXT})
    return _object({"tiers": _list({"anyOf": [_object({**_PLACE, **result}, optional), *others, failed]})})


BLOCK_LINE = _object({"tier": TEXT, "key": TEXT, "size": COUNT, "mtime": NUMBER, "rank": COUNT, "group": COUNT})

_COPY = _object(
    {
        "from": TEXT, "to": TEXT, "dry_run": FLAG, "copied": COUNT, "copied_bytes": COUNT, "present": COUNT,
        "bad": COUNT, "errors": COUNT, "left_out": _map(TEXT), "no_room": FLAG, "seen_bytes": COUNT, "seconds": NUMBER,
    }
)  # fmt: skip

_SHOWN_BLOCK = _object(
    {
        "kind": {"const": "block"}, "key": TEXT, "namespace": TEXT, "rank": COUNT, "group": COUNT, "hash": TEXT,
        "size": COUNT, "mtime": NUMBER, "reason": TEXT,
        "verdict": {"enum": ["good", "bad", "not verified", "not readable"]},
        "seal": {"type": ["object", "null"]},
    }
)  # fmt: skip
_SHOWN_NAMESPACE = _object(
    {
        "kind": {"const": "namespace"}, "namespace": TEXT, "blocks": COUNT, "bytes": COUNT, "ranks": _list(COUNT),
        "oldest": NUMBER_OR_NULL, "newest": NUMBER_OR_NULL, "identity": {"type": ["object", "null"]},
        "siblings": _list(_object({"namespace": TEXT, "differs": _map(_list(TEXT))})),
    }
)  # fmt: skip

RESULTS: dict[str, Schema] = {
    "ls": _tiers({"blobs": COUNT, "bytes": COUNT}),
    "du": _tiers(
        {
            "blocks": SHARE,
            "groups": _list(
                _object({"namespace": TEXT, "rank": COUNT, "group": COUNT, "blobs": COUNT, "bytes": COUNT})
            ),
            "ages": _map(SHARE),
            "other": SHARE,
            "used_bytes": COUNT_OR_NULL,
            "max_bytes": COUNT_OR_NULL,
            "namespaces": _map(_map(TEXT)),
            "sampled_seals": _map(COUNT),
            "sampled_misses": _map(COUNT),
            "seconds": NUMBER,
        }
    ),
    "show": _tiers({"found": _list({"anyOf": [_SHOWN_BLOCK, _SHOWN_NAMESPACE]})}),
    "verify": _tiers(
        {
            "blocks": COUNT, "bytes": COUNT, "bad_count": COUNT, "foreign": COUNT, "errors": COUNT,
            "quarantined": COUNT, "kept": COUNT, "bad": _list(_list(TEXT)), "subset": NUMBER, "moves_aside": FLAG,
            "dry_run": FLAG, "resumed_units": COUNT, "seconds": NUMBER, "bytes_per_s": NUMBER, "good_again": COUNT,
            "stopped": FLAG, "misses": _map(COUNT), "unknown_keys": _map(COUNT), "seals": _map(COUNT),
        }
    ),
    "gc": _tiers(
        {
            "dry_run": FLAG, "blobs": COUNT, "bytes": COUNT, "removed_blobs": _map(COUNT), "removed_bytes": _map(COUNT),
            "kept_by_error": COUNT, "own_bytes": COUNT, "leftovers": COUNT, "ttl_waits_s": NUMBER,
            "seconds": NUMBER,
        },
        _object({**_PLACE, "skipped": TEXT}, _LIFECYCLE),
        optional=_LIFECYCLE,
    ),
    "rm": _tiers(
        {
            "dry_run": FLAG,
            "namespaces": _list(
                _object(
                    {
                        "namespace": TEXT, "found": SHARE, "removed": SHARE, "failed": COUNT, "written": COUNT,
                        "reason": TEXT,
                    }
                )
            ),
        }
    ),
    "warm": _COPY,
    "migrate": _COPY,
    "bench": _object(
        {
            "cores": COUNT,
            "hops": _list(
                _object(
                    {"name": TEXT, "bytes_per_s": NUMBER, "ceiling": NUMBER_OR_NULL, "ceiling_is": TEXT}
                )
            ),
        }
    ),
    "check": _object(
        {"verdict": TEXT},
        {
            "config": {"type": "object"}, "findings": _list(TEXT), "notes": _list(TEXT), "blocks": _list(_map(COUNT)),
        },
    ),
    "doctor": _object(
        {
            "findings": _list(
                _object(
                    {
                        "level": {"enum": ["ok", "note", "warning", "problem"]}, "where": TEXT, "check": TEXT,
                        "message": TEXT, "fix": TEXT,
                    }
                )
            )
        }
    ),
    "size": _object(
        {
            "model": TEXT, "shape": {"type": "object"}, "number_bytes": COUNT, "tp_size": COUNT, "token_bytes": COUNT,
            "token_rank_bytes": COUNT, "token_bytes_max": COUNT, "window_bytes": COUNT, "chunk_tokens": COUNT_OR_NULL,
            "block_bytes": COUNT_OR_NULL, "block_rank_bytes": COUNT_OR_NULL, "is_exact": FLAG,
            "tokens_per_gib": COUNT_OR_NULL,
            "break_even": _list(_object({"prefill_tokens_per_s": NUMBER, "bytes_per_s": NUMBER})),
            "fits": _list(_object({"name": TEXT, "max_bytes": COUNT_OR_NULL, "tokens": COUNT_OR_NULL})),
            "notes": _list(TEXT),
        }
    ),
    "vllm-config": _object({"ways": _map({"type": "object"})}),
    "serve-metrics": _object({"url": TEXT}),
}  # fmt: skip


def document_schema(command: str) -> Schema:
    """The schema of a command's document; of ``ls``: of each of its lines."""
    result = RESULTS[command]
    document = _object(
        {
            "command": {"const": command},
            "version": TEXT,
            "ok": {"type": "boolean", "description": "Whether the exit code is 0."},
            "result": {"anyOf": [{"type": "null"}, result]},
            "errors": _list(TEXT),
        }
    )
    schema: Schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return schema | ({"anyOf": [document, BLOCK_LINE]} if command == "ls" else document)

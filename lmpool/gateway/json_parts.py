"""JSON of parts that are JSON already: large ones are written once, and never become objects."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Raw:
    """A value as JSON."""

    data: bytes


def dumps(value: object) -> bytes:
    """A value as JSON, with `Raw` ones in it as they are."""
    parts: list[bytes] = []
    _write(value, parts)
    return b"".join(parts)


def _write(value: object, parts: list[bytes]) -> None:
    if isinstance(value, Raw):
        parts.append(value.data)
    elif isinstance(value, dict):
        before = b"{"
        for name, each in value.items():
            parts.append(before + json.dumps(name).encode() + b":")
            _write(each, parts)
            before = b","
        parts.append(b"}" if value else b"{}")
    elif isinstance(value, list) and value and isinstance(value[0], (dict, list, Raw)):
        for number, each in enumerate(value):
            parts.append(b"," if number else b"[")
            _write(each, parts)
        parts.append(b"]")
    else:
        parts.append(json.dumps(value, separators=(",", ":")).encode())

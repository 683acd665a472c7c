"""What can be done to an engine, as data: a scenario is a sequence of operations.

Any part of a scenario is a scenario. So a failing one is made smaller by leaving operations out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np

from lmpool.backends.engine import Request
from lmpool.checks import quoted
from lmpool.wants import Generation, Row, Want

Prompt: TypeAlias = tuple[int, ...]

_SHOWN = 6


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter by how its files are written: `make_adapter(name, folder, seed, **how)`."""

    name: str
    seed: int
    how: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        how = "".join(f", {name}={value!r}" for name, value in self.how)
        return f"{_short(self.name)} (seed {self.seed}{how})"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: `number` is its id, which another one may have once it has ended.

    Of a continuation the tokens `begun` were drawn elsewhere.
    """

    number: int
    prompt: Prompt
    adapter: str | None = None
    want: Want = Row()  # noqa: RUF009 -- frozen
    begun: tuple[int, ...] = ()

    @property
    def id(self) -> bytes:
        """As workers have them: 16 bytes that look random. Others have the same half of them."""
        return _half(self.number & ~1) + _half(self.number & ~2)

    def request(self) -> Request:
        """Its tokens are a read-only view of bytes, as a worker's; of some numbers an array."""
        tokens = np.array(self.prompt, dtype="<u4")
        if self.number % 3:
            tokens = np.frombuffer(tokens.tobytes(), dtype="<u4")
        # In two parts, as if two had drawn them.
        halves = (self.begun[: len(self.begun) // 2], self.begun[len(self.begun) // 2 :])
        begun = tuple(Generation(np.array(ids, np.int32), 0, "length") for ids in halves if ids)
        return Request(self.id, tokens, self.adapter, self.want, begun)

    def __str__(self) -> str:
        by = "" if self.adapter is None else f" by {_short(self.adapter)}"
        begun = f" begun with {_tokens(self.begun)}" if self.begun else ""
        return f"#{self.number} {_described(self.want)} after {_tokens(self.prompt)}{begun}{by}"


@dataclass(frozen=True, slots=True)
class Submit:
    """`engine.submit` of these."""

    asked: tuple[Asked, ...]

    def __str__(self) -> str:
        return f"submit {len(self.asked)}: {_some(map(str, self.asked), '; ')}"


@dataclass(frozen=True, slots=True)
class Step:
    """`engine.step`, so many times at most: while something is in flight."""

    times: int = 1

    def __str__(self) -> str:
        return f"step {self.times} times" if self.times > 1 else "step"


@dataclass(frozen=True, slots=True)
class Settle:
    """`engine.step` until nothing is in flight."""

    def __str__(self) -> str:
        return "step until nothing is in flight"


@dataclass(frozen=True, slots=True)
class Cancel:
    """`engine.cancel` of the ids of these numbers, whether they are in flight or not."""

    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"cancel {_some((f'#{n}' for n in self.numbers), ', ')}"


@dataclass(frozen=True, slots=True)
class AddAdapter:
    """`engine.add_adapter`, which replaces one of the same name."""

    files: AdapterFiles

    def __str__(self) -> str:
        return f"add the adapter {self.files}"


@dataclass(frozen=True, slots=True)
class RemoveAdapter:
    """`engine.remove_adapter`, whether there is one or not."""

    name: str

    def __str__(self) -> str:
        return f"remove the adapter {_short(self.name)}"


@dataclass(frozen=True, slots=True)
class ClearCache:
    """`engine.clear_cache`."""

    def __str__(self) -> str:
        return "clear the cache"


@dataclass(frozen=True, slots=True)
class CachePrefix:
    """`engine.cache_prefix`, of which `PromptFailed` may come where there is no room."""

    prompt: Prompt

    def __str__(self) -> str:
        return f"cache the prefix {_tokens(self.prompt)}"


Operation: TypeAlias = (
    Submit | Step | Settle | Cancel | AddAdapter | RemoveAdapter | ClearCache | CachePrefix
)


def described(operations: Sequence[Operation], most: int = 12) -> str:
    """The operations, one a line, the last `most` of them."""
    lines = [f"  {n}. {operation}" for n, operation in enumerate(operations, 1)]
    if len(lines) > most:
        lines = [f"  ({len(lines) - most} operations before)", *lines[-most:]]
    return "\n".join(lines)


def _half(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=8).digest()


def _described(want: Want) -> str:
    """Its kind, and the fields that are not as they are by default."""
    said = [
        f"{field.name}={quoted(value)}"
        for field in fields(want)
        if (value := getattr(want, field.name)) != field.default
    ]
    return f"{want.kind}({', '.join(said)})" if said else want.kind


def _tokens(prompt: Prompt) -> str:
    if len(prompt) <= _SHOWN:
        return str(list(prompt))
    return f"{str(list(prompt[: _SHOWN - 2]))[:-1]}, ...] ({len(prompt)} tokens)"


def _some(parts: Iterable[str], between: str) -> str:
    found = list(parts)
    more = f"{between}{len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return between.join(found[:_SHOWN]) + more


def _short(name: str) -> str:
    """An adapter's name, without most of its fingerprint."""
    before, at, fingerprint = name.partition("@")
    return f"{before}{at}{fingerprint[-6:]}"

"""What a pool serves, as its workers publish it and its clients read it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal, NamedTuple

import msgpack

from lmpool.affinity import BLOCK_TOKENS, BLOCKS, Placement
from lmpool.checks import said
from lmpool.errors import WireError
from lmpool.head_form import HeadForm
from lmpool.keys import PROTOCOL, PoolKeys, ShardKeys

INFO_VERSION = 2
MAX_INFO_BYTES = 1 << 16
MAX_SHARDS = 64
MAX_LANES = 1024
LAYOUTS_MOST: Final = 8
"""Former layouts that are known of a pool."""

Encoding = Literal["f32", "bf16", "f16"]

MAY_DIFFER: Final = frozenset(
    {
        *("model", "revision", "max_backlog", "client_backlog", "result_ttl_ms", "no_head"),
        *("layout", "layouts"),
    }
)
"""Fields in which the workers of one pool may differ; the latest to join decides."""


class Layout(NamedTuple):
    """How a pool lay: `name` tells it from all others, also of as many shards and lanes; '' where
    no command had changed it. `lanes` are those of each shard."""

    name: str
    shards: int
    lanes: int


class OfLaterRelease(WireError):
    """A model info of a version that only a later release reads."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One pool's model, and the bounds its workers agreed on.

    `fingerprint` is 32 hex digits; its first eight are part of every key. `vocab_size` is the
    length of a row, `max_prompt_tokens` the longest prompt, `encoding` the smallest lossless row
    encoding of this model, `max_backlog` the jobs that may wait in a stream, `client_backlog` those
    of one client, `result_ttl_ms` how long an answer stays. `protocols` are the numbers in whose
    keys the workers serve, `shards` the slots of the pool, `lanes` the lanes of each;
    `block_tokens` and `blocks` say which part of a prompt decides on both (see `Placement`). `head`
    is how hidden states become rows; None where the pool gives none, and `no_head` says why.
    `layout` is the name of how ``lmpool shards`` laid the pool, '' where it never did, and
    `layouts` are those before, the latest last.
    """

    model: str
    revision: str | None
    fingerprint: str
    vocab_size: int
    max_prompt_tokens: int
    dtype: str
    engine: str
    encoding: Encoding
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    protocols: tuple[int, ...] = (PROTOCOL,)
    shards: int = 1
    lanes: int = 1
    block_tokens: int = BLOCK_TOKENS
    blocks: int = BLOCKS
    max_backlog: int = 100_000
    client_backlog: int = 4096
    result_ttl_ms: int = 600_000
    head: HeadForm | None = None
    no_head: str = ""
    layout: str = ""
    layouts: tuple[Layout, ...] = ()

    @property
    def fingerprint8(self) -> str:
        """The part of the fingerprint that key names carry."""
        return self.fingerprint[:8]

    def shard_keys(self, keys: PoolKeys) -> tuple[ShardKeys, ...]:
        """The keys of the pool's shards, by number."""
        return keys.shards(self.fingerprint8, self.shards, self.lanes)

    def placement(self) -> Placement:
        """Where its prompts belong."""
        return Placement(self.shards, self.lanes, self.block_tokens, self.blocks)

    def gives_the_same_as(self, other: ModelInfo) -> bool:
        """Whether what was checked and named for one is right for the other, wherever it lies."""
        return (
            self.fingerprint == other.fingerprint
            and self.max_prompt_tokens == other.max_prompt_tokens
        )

    def mark(self) -> bytes:
        """What a living worker says that it serves: equal for those that may share a pool, and are
        where it lies."""
        marked = {n: v for n, v in asdict(self).items() if n not in MAY_DIFFER}
        if self.layout:  # else it is as that of releases which know of no layouts
            marked["layout"] = self.layout
        return fingerprint(marked).encode()

    def moved_to(self, shards: int, lanes: int) -> ModelInfo:
        """The same in another layout, which has a name that no other has."""
        layouts = (*self.layouts, Layout(self.layout, self.shards, self.lanes))[-LAYOUTS_MOST:]
        name = secrets.token_hex(8)
        return replace(self, shards=shards, lanes=lanes, layout=name, layouts=layouts)

    def laid_as(self, other: ModelInfo) -> ModelInfo:
        """The same in the layout of `other`."""
        return replace(
            self,
            shards=other.shards,
            lanes=other.lanes,
            layout=other.layout,
            layouts=other.layouts,
        )

    def follows(self, other: ModelInfo) -> bool:
        """Whether the pool has left the layout of `other` on its way to this one."""
        return any(layout.name == other.layout for layout in self.layouts)

    def former(self) -> Iterator[ModelInfo]:
        """The same in each of its layouts before, the latest first."""
        for number in reversed(range(len(self.layouts))):
            name, shards, lanes = self.layouts[number]
            before = self.layouts[:number]
            yield replace(self, shards=shards, lanes=lanes, layout=name, layouts=before)

    def left_shards(self, keys: PoolKeys) -> tuple[ShardKeys, ...]:
        """What the pool left: shards that it has no more, and those that had more lanes, with as
        many as they ever had."""
        found: dict[str, ShardKeys] = {}
        for layout in self.layouts:
            if layout.shards == self.shards and layout.lanes <= self.lanes:
                continue
            for shard in keys.shards(self.fingerprint8, layout.shards, layout.lanes):
                if shard.lanes > getattr(found.get(shard.prefix), "lanes", 0):
                    found[shard.prefix] = shard
        return tuple(found.values())

    def in_words(self) -> str:
        """How the pool lies, as people are told."""
        return in_words(self.shards, self.lanes)

    def pack(self) -> bytes:
        """As the msgpack map stored under ``lmpool:<pool>``."""
        packed: bytes = msgpack.packb({"v": INFO_VERSION, **asdict(self)})
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> ModelInfo:
        """Read what `pack` wrote. Raises `WireError` for anything else."""
        if len(data) > MAX_INFO_BYTES:
            raise WireError(f"model info of {len(data)} bytes: at most {MAX_INFO_BYTES} expected")
        try:
            found: Any = msgpack.unpackb(data, strict_map_key=True)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise WireError(f"model info is not msgpack: {said(error)}") from None
        try:
            return cls._of(found)
        except RecursionError:  # of a message about it
            raise WireError("model info whose fields are nested too deeply") from None

    @classmethod
    def _of(cls, found: object) -> ModelInfo:
        """The model info of what was unpacked. Raises `WireError`."""
        if not isinstance(found, dict) or found.get("v") != INFO_VERSION:
            version = found.get("v") if isinstance(found, dict) else type(found).__name__
            older = type(version) is int and version < INFO_VERSION
            later = type(version) is int and version > INFO_VERSION
            raise (OfLaterRelease if later else WireError)(
                f"model info of version {version!r:.40}: this lmpool reads version {INFO_VERSION}; "
                + (
                    "upgrade the lmpool of the pool's workers"
                    if older
                    else "upgrade this lmpool to the one that the pool's workers run"
                )
            )
        # Fields that a later release adds are ignored; one of ours that is missing is an error.
        known = {f.name: found[f.name] for f in fields(cls) if f.name in found}
        try:
            for name in known.keys() & {"eos_token_ids", "protocols"}:
                known[name] = tuple(known[name])
            if "layouts" in known:
                known["layouts"] = tuple(Layout(*found) for found in known["layouts"])
            if known.get("head") is not None:
                known["head"] = HeadForm.of(known["head"])
            info = cls(**known)
        except (KeyError, TypeError) as error:
            raise WireError(f"model info is incomplete: {error}") from None
        info._check()
        return info

    def _check(self) -> None:
        for name in (
            "vocab_size",
            "max_prompt_tokens",
            "shards",
            "lanes",
            "block_tokens",
            "blocks",
            "max_backlog",
            "client_backlog",
            "result_ttl_ms",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise WireError(f"model info has {name}={value!r:.40}: a positive integer expected")
        for name, most in (("shards", MAX_SHARDS), ("lanes", MAX_LANES)):
            if getattr(self, name) > most:
                raise WireError(
                    f"model info has {name}={getattr(self, name)}: at most {most} expected"
                )
        if len(self.layouts) > LAYOUTS_MOST or not all(map(_is_sound, self.layouts)):
            raise WireError(f"model info has layouts={self.layouts!r:.80}: former ones expected")
        for name in ("eos_token_ids", "protocols"):
            if not all(type(number) is int for number in getattr(self, name)):
                raise WireError(
                    f"model info has {name}={getattr(self, name)!r:.80}: integers expected"
                )
        if PROTOCOL not in self.protocols:
            newer = max(self.protocols, default=0) > PROTOCOL
            raise WireError(
                f"the pool is served in protocol {', '.join(map(str, self.protocols))}, and this "
                f"lmpool speaks {PROTOCOL}: upgrade "
                + ("this lmpool" if newer else "the lmpool of the pool's workers")
            )
        for name in ("model", "fingerprint", "dtype", "engine", "encoding", "no_head", "layout"):
            if not isinstance(getattr(self, name), str):
                raise WireError(
                    f"model info has {name}={getattr(self, name)!r:.40}: a string expected"
                )
        if len(self.fingerprint) != 32 or self.encoding not in ("f32", "bf16", "f16"):
            raise WireError(
                f"model info has fingerprint={self.fingerprint!r:.40}, "
                f"encoding={self.encoding!r:.40}"
            )


def in_words(shards: int, lanes: int) -> str:
    """So many shards, of so many lanes each, as people are told."""
    return (
        f"{shards} {'shard' if shards == 1 else 'shards'} of "
        f"{lanes} {'lane' if lanes == 1 else 'lanes'}"
    )


def _is_sound(layout: Layout) -> bool:
    """Whether that is one which a pool may have had."""
    return (
        isinstance(layout.name, str)
        and all(type(number) is int for number in layout[1:])
        and 1 <= layout.shards <= MAX_SHARDS
        and 1 <= layout.lanes <= MAX_LANES
    )


def fingerprint(identity: Mapping[str, object]) -> str:
    """The fingerprint of whatever changes the numbers, as 32 hex digits.

    `identity` maps names (model files, revision, dtype, quantization, engine) to msgpack-able
    values; the order of the names does not matter.
    """
    canonical = msgpack.packb(sorted(identity.items()))
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()

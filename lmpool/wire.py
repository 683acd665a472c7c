"""What travels: jobs on the job streams, notices to clients.

msgpack, read strictly: sizes are bounded, every field's type is checked, extension types and
unknown versions are refused with a reason.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from lmpool.errors import JobFormatError
from lmpool.interrupts import is_its_own
from lmpool.rows import refuse_extension
from lmpool.wants import DIGEST_BYTES, Digest, Want, want_from_wire, want_to_wire

JOB_VERSION: Final = 2
MAX_JOB_BYTES: Final = 8 << 20


_TOKEN: Final = np.dtype("<u4")


# --- jobs --------------------------------------------------------------------------------------


# Nobody changes one; but there is one for each prompt, and one that is frozen takes longer to make.
@dataclass(slots=True, unsafe_hash=True)
class Job:
    """One prompt and its want.

    `tokens` are the prompt's ids as little-endian uint32 bytes. `adapter` is ``name@fingerprint``.
    `deadline` and `sent` are milliseconds of the server's clock, known once it is sent. `trace` is
    a W3C traceparent, of a call that is traced.
    """

    want: Want
    digest: Digest
    tokens: bytes
    adapter: str | None
    deadline: int | None = None
    sent: int = 0
    trace: str | None = None

    def token_ids(self) -> npt.NDArray[np.uint32]:
        """The prompt, uint32 [length], read-only."""
        return np.frombuffer(self.tokens, _TOKEN)


class JobPacker:
    """Packs jobs that are sent at one moment, `sent`: the map of each is the msgpack that the
    stream carries. What many have in common is packed once.
    """

    def __init__(self, sent: int) -> None:
        self._sent = sent
        self._heads: dict[tuple[Want, str | None], bytes] = {}
        self._last: tuple[Want, str | None, bytes] | None = None
        """The last of them: a want takes longer to look up than a job to pack."""

    def pack(
        self,
        want: Want,
        adapter: str | None,
        digest: Digest,
        tokens: bytes,
        deadline: int | None,
        trace: str | None = None,
    ) -> bytes:
        """One job."""
        last = self._last
        if last is not None and last[0] is want and last[1] is adapter:
            head = last[2]
        else:
            if last is not None:
                self._heads[last[0], last[1]] = last[2]
            found = self._heads.get((want, adapter)) if self._heads else None
            head = self.head(want, adapter) if found is None else found
            self._last = want, adapter, head
        due = b"\xc0" if deadline is None else _UINT64.pack(0xCF, deadline)
        rest = (digest, _DEADLINE, due, _TOKENS, _bin_header(len(tokens)), tokens)
        if trace is None:
            return b"".join((_SEVEN, head, *rest))
        return b"".join((_EIGHT, head, *rest, _TRACE, msgpack.packb(trace)))

    def head(self, want: Want, adapter: str | None) -> bytes:
        """What the fields of such jobs begin with, up to the digest itself."""
        sent = self._sent
        packed = _UINT64.pack(0xCF, sent) if sent >> 32 > 0 else msgpack.packb(sent)
        return b"".join((_common(want, adapter), packed, _DIGEST))


_COMMON_MOST: Final = 64
_COMMON_BYTES: Final = 4096
_commons: dict[tuple[Want, str | None], bytes] = {}
_latest: tuple[Want, str | None, bytes] | None = None
"""What of them was asked for last: a want takes longer to look up than all else."""


def _common(want: Want, adapter: str | None) -> bytes:
    """What the fields of all such jobs begin with, whenever they are sent."""
    global _latest
    latest = _latest
    if latest is not None and latest[0] is want and latest[1] is adapter:
        return latest[2]
    found = _commons.get((want, adapter))
    if found is None:
        common = {"v": JOB_VERSION, "want": want_to_wire(want), "adapter": adapter}
        found = b"".join(map(msgpack.packb, (*_flat(common), "sent")))
        if len(found) <= _COMMON_BYTES:  # a want may hold a list for each position
            if len(_commons) >= _COMMON_MOST:
                _commons.clear()
            _commons[want, adapter] = found
    if len(found) <= _COMMON_BYTES:
        _latest = want, adapter, found
    return found


def claim_head(digest: Digest, lane: int, adapter: int, deadline: int | None) -> str:
    """What ``enqueue.lua`` is told of a job beside the job: 60 characters.

    `adapter` says which of the call's adapters it is for, the first is 1; 0 is none.
    """
    return digest.hex() + _said(lane, adapter, deadline)


@lru_cache(1024)
def _said(lane: int, adapter: int, deadline: int | None) -> str:
    """What many heads have in common."""
    return f"{lane:5} {adapter:3} {'' if deadline is None else deadline:18}"


_UINT64: Final = struct.Struct(">BQ")
_DEADLINE: Final[bytes] = msgpack.packb("deadline")
_TOKENS: Final[bytes] = msgpack.packb("tokens")
_TRACE: Final[bytes] = msgpack.packb("trace")
_NO_DEADLINE: Final = _DEADLINE + b"\xc0"
_SOME_DEADLINE: Final = _DEADLINE + b"\xcf"
_SEVEN, _EIGHT = b"\x87", b"\x88"
"""The heads of maps of so many fields."""
TRACE_CHARS: Final = 55
"""Of a W3C traceparent."""


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [part for item in fields.items() for part in item]


def _bin_header(length: int) -> bytes:
    if length < 1 << 8:
        return b"\xc4%c" % length
    if length < 1 << 16:
        return b"\xc5" + length.to_bytes(2, "big")
    return b"\xc6" + length.to_bytes(4, "big")


_DIGEST: Final[bytes] = msgpack.packb("digest") + _bin_header(DIGEST_BYTES)
_UINT64_HEAD: Final = b"\xcf"
_FORMS_MOST: Final = 1024


def pack_job(job: Job) -> bytes:
    """A job as the msgpack map that the stream carries."""
    pack = JobPacker(job.sent).pack
    return pack(job.want, job.adapter, job.digest, job.tokens, job.deadline, job.trace)


class _Form(NamedTuple):
    """What entries of one size have in common, and where the rest stands."""

    unpack: Callable[[bytes], tuple[Any, ...]]
    kind: bytes
    due: bytes
    length: bytes
    """What stands before the time at which it was sent, the deadline, and the tokens."""
    asks: tuple[Want, str | None]


class JobReader:
    """Reads what `JobPacker` wrote, as `unpack_job` does, many jobs at once.

    Those of one kind and length differ in digest, tokens and times alone: nothing else is looked
    at but whether it is the same.
    """

    def __init__(self) -> None:
        self._forms: dict[int, _Form] = {}
        """Of the jobs that were read last, by the size of their entries."""
        self._asks: dict[bytes, tuple[Want, str | None]] = {}

    def read(self, data: bytes) -> Job:
        """One job, which others may be like. Raises as `unpack_job`."""
        job = unpack_job(data)
        if job.want.cached:  # others differ from each other
            self._learn(data, job)
        return job

    def read_known(self, entries: Sequence[bytes], start: int = 0) -> list[Job]:
        """The jobs of `entries` from that one on, as far as they are like some that were read, and
        all of them ask for the same of one adapter."""
        forms, found = self._forms, list[Job]()
        asked: tuple[Want, str | None] | None = None
        for at in range(start, len(entries)):
            data = entries[at]
            form = forms.get(len(data))
            if form is None:
                break
            unpack, kind, due, length, asks = form
            its_kind, sent, named, digest, its_due, deadline, its_length, tokens = unpack(data)
            if its_kind != kind or named != _DIGEST or its_due != due or its_length != length:
                break
            if found and asks is not asked:
                break
            asked = want, adapter = asks
            found.append(
                Job(want, digest, tokens, adapter, None if deadline == b"" else deadline, sent)
            )
        return found

    def _learn(self, data: bytes, job: Job) -> None:
        """Know those that are like this one, if it is packed as usual."""
        kind = b"".join((_SEVEN, _common(job.want, job.adapter), _UINT64_HEAD))
        if len(kind) > _COMMON_BYTES:
            return
        if max(len(self._forms), len(self._asks)) >= _FORMS_MOST:
            self._forms, self._asks = {}, {}
        due, time = (_SOME_DEADLINE, "Q") if job.deadline is not None else (_NO_DEADLINE, "0s")
        length = _TOKENS + _bin_header(len(job.tokens))
        parts = struct.Struct(
            f">{len(kind)}sQ{len(_DIGEST)}s{DIGEST_BYTES}s"
            f"{len(due)}s{time}{len(length)}s{len(job.tokens)}s"
        )
        if parts.size == len(data):
            asks = self._asks.setdefault(kind, (job.want, job.adapter))
            self._forms[len(data)] = _Form(parts.unpack, kind, due, length, asks)


class RefusedJob(JobFormatError):
    """A job we cannot run, of which we can still tell the digest: its callers can be told."""

    def __init__(self, message: str, digest: Digest) -> None:
        super().__init__(message)
        self.digest = digest


def unpack_job(data: bytes) -> Job:
    """Read what `pack_job` wrote.

    Raises:
        RefusedJob: the entry has a digest but is of another version or malformed.
        JobFormatError: the entry is no job at all.
    """
    if len(data) > MAX_JOB_BYTES:
        raise JobFormatError(f"a job of {len(data)} bytes: at most {MAX_JOB_BYTES} are read")
    try:
        found: Any = msgpack.unpackb(data, strict_map_key=True, ext_hook=refuse_extension)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise JobFormatError(f"not msgpack: {error or type(error).__name__}") from None
    if not isinstance(found, dict):
        raise JobFormatError(f"a {type(found).__name__} instead of a map")
    digest = found.get("digest")
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise JobFormatError("no digest of 16 bytes")
    try:
        return _job(found, Digest(digest))
    except RecursionError:  # of a message about it
        raise RefusedJob("fields nested too deeply", Digest(digest)) from None
    except JobFormatError as error:
        raise RefusedJob(str(error), Digest(digest)) from None


def _job(found: Mapping[str, Any], digest: Digest) -> Job:
    """The job of a map. Raises `JobFormatError` for a map that is none."""
    if found.get("v") != JOB_VERSION:
        raise JobFormatError(
            f"job version {found.get('v')!r:.40}: this worker reads version {JOB_VERSION}"
        )
    want, tokens = want_from_wire(found.get("want")), found.get("tokens")
    if not isinstance(tokens, bytes) or not tokens or len(tokens) % 4:
        raise JobFormatError("tokens are not a positive number of uint32")
    adapter, deadline, sent = found.get("adapter", 0), found.get("deadline", ""), found.get("sent")
    if not (adapter is None or (isinstance(adapter, str) and 0 < len(adapter) <= 512)):
        raise JobFormatError("adapter is neither nil nor a name")
    if not (deadline is None or type(deadline) is int) or type(sent) is not int:
        raise JobFormatError("deadline or sent is not a number of milliseconds")
    trace = found.get("trace")
    if not (type(trace) is str and len(trace) == TRACE_CHARS):
        trace = None  # whatever it is, no job fails of it
    return Job(want, digest, tokens, adapter, deadline, sent, trace)


# --- notices -----------------------------------------------------------------------------------

Status = Literal["ok", "failed", "expired", "refused", "unknown_adapter"]


@dataclass(slots=True, unsafe_hash=True)
class Notice:
    """What became of one digest: the result is there, or an error."""

    digest: Digest
    status: str
    error: str = ""


def read_notices(fields: Mapping[bytes, bytes]) -> list[Notice]:
    """The notices in one entry of a reply stream; an entry that is no notice gives none.

    ``ok`` holds any number of digests, 32 hex digits each; an error comes alone, as ``digest``,
    ``status`` and ``error``.
    """
    if b"ok" in fields:
        return [Notice(digest, "ok") for digest in read_done(fields)]
    digests, status = _digests(fields.get(b"digest", b"")), fields.get(b"status", b"")
    if len(digests) != 1 or not status:
        return []
    error = fields.get(b"error", b"").decode("utf-8", "replace")
    return [Notice(digests[0], status.decode("utf-8", "replace"), error)]


def read_done(fields: Mapping[bytes, bytes]) -> list[Digest]:
    """Those of an entry's notices that say that a result is there: nearly all that there are."""
    return _digests(fields.get(b"ok", b""))


def _digests(text: bytes) -> list[Digest]:
    """Digests written as 32 hex digits each, one after another; none from anything else.

    Of a text that was cut, those that are whole.
    """
    whole = len(text) - len(text) % (2 * DIGEST_BYTES)
    try:
        found = bytes.fromhex(text[:whole].decode("ascii"))
    except ValueError as error:
        if not is_its_own(error):
            raise
        return []
    if 2 * len(found) != whole:  # blanks are read over
        return []
    return [Digest(found[i : i + DIGEST_BYTES]) for i in range(0, len(found), DIGEST_BYTES)]

"""What travels: jobs on the job streams, notices to clients.

msgpack, read strictly: sizes are bounded, every field's type is checked, extension types and
unknown versions are refused with a reason.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgpack
import numpy as np
import numpy.typing as npt

from lmpool.errors import JobFormatError
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
        head = self._heads.get((want, adapter))
        if head is None:
            head = self._heads[want, adapter] = self.head(want, adapter)
        due = b"\xc0" if deadline is None else _UINT64.pack(0xCF, deadline)
        rest = (digest, _DEADLINE, due, _TOKENS, _bin_header(len(tokens)), tokens)
        if trace is None:
            return b"".join((_SEVEN, head, *rest))
        return b"".join((_EIGHT, head, *rest, _TRACE, msgpack.packb(trace)))

    def head(self, want: Want, adapter: str | None) -> bytes:
        """What the fields of such jobs begin with, up to the digest itself."""
        return b"".join((_common(want, adapter), msgpack.packb(self._sent), _DIGEST))


_COMMON_MOST: Final = 64
_COMMON_BYTES: Final = 4096
_commons: dict[tuple[Want, str | None], bytes] = {}


def _common(want: Want, adapter: str | None) -> bytes:
    """What the fields of all such jobs begin with, whenever they are sent."""
    found = _commons.get((want, adapter))
    if found is None:
        common = {"v": JOB_VERSION, "want": want_to_wire(want), "adapter": adapter}
        found = b"".join(map(msgpack.packb, (*_flat(common), "sent")))
        if len(found) <= _COMMON_BYTES:  # a want may hold a list for each position
            if len(_commons) >= _COMMON_MOST:
                _commons.clear()
            _commons[want, adapter] = found
    return found


_UINT64: Final = struct.Struct(">BQ")
_DEADLINE: Final[bytes] = msgpack.packb("deadline")
_TOKENS: Final[bytes] = msgpack.packb("tokens")
_TRACE: Final[bytes] = msgpack.packb("trace")
_NO_DEADLINE: Final = _DEADLINE + b"\xc0" + _TOKENS
_SOME_DEADLINE: Final = _DEADLINE + b"\xcf"
_DUE_BYTES: Final = len(_SOME_DEADLINE) + 8
_BIN_WIDTH: Final = {b"\xc4": 1, b"\xc5": 2, b"\xc6": 4}
"""Bytes of the length, by the head of what holds bytes."""
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


def pack_job(job: Job) -> bytes:
    """A job as the msgpack map that the stream carries."""
    pack = JobPacker(job.sent).pack
    return pack(job.want, job.adapter, job.digest, job.tokens, job.deadline, job.trace)


class JobReader:
    """Reads what `JobPacker` wrote, as `unpack_job` does.

    Jobs that were sent together begin alike, and those of one call and length differ in digest and
    tokens alone: no more than what differs is read.
    """

    def __init__(self) -> None:
        self._head = b""
        """What stands before the digest of the last job; none is known at first."""
        self._middle = b""
        """What stands between its digest and its tokens."""
        self._size = 0
        self._last: Job | None = None

    def read(self, data: bytes) -> Job:
        """One job. Raises as `unpack_job`."""
        last, head = self._last, self._head
        if last is not None and data.startswith(head):
            at = len(head)
            middle = at + DIGEST_BYTES
            if len(data) == self._size and data.startswith(self._middle, middle):
                digest, tokens = Digest(data[at:middle]), data[middle + len(self._middle) :]
                return Job(last.want, digest, tokens, last.adapter, last.deadline, last.sent)
            job = _with_head(data, at, last)
        else:
            job = None
        if job is None:
            job = unpack_job(data)
            head = _SEVEN + JobPacker(job.sent).head(job.want, job.adapter)
            if not data.startswith(head):
                return job
        self._last, self._head, self._size = job, head, len(data)
        self._middle = data[len(head) + DIGEST_BYTES : len(data) - len(job.tokens)]
        return job


def _with_head(data: bytes, at: int, other: Job) -> Job | None:
    """The job of an entry that begins as that of another one, up to the digest at `at`; None where
    the rest is not what is usual."""
    if len(data) > MAX_JOB_BYTES:
        return None
    digest, at = Digest(data[at : at + DIGEST_BYTES]), at + DIGEST_BYTES
    deadline = None
    if data.startswith(_NO_DEADLINE, at):
        at += len(_NO_DEADLINE)
    elif data.startswith(_SOME_DEADLINE, at) and data.startswith(_TOKENS, at + _DUE_BYTES):
        deadline = int.from_bytes(data[at + len(_SOME_DEADLINE) : at + _DUE_BYTES], "big")
        at += _DUE_BYTES + len(_TOKENS)
    else:
        return None
    start = at + 1 + _BIN_WIDTH.get(data[at : at + 1], 0)
    tokens = data[start:]
    if not tokens or len(tokens) % 4 or data[at:start] != _bin_header(len(tokens)):
        return None
    return Job(other.want, digest, tokens, other.adapter, deadline, other.sent)


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
    except ValueError:
        return []
    if 2 * len(found) != whole:  # blanks are read over
        return []
    return [Digest(found[i : i + DIGEST_BYTES]) for i in range(0, len(found), DIGEST_BYTES)]

"""What travels: jobs on the job stream, rows in the result cache, notices to clients.

msgpack, read strictly: sizes are bounded, every field's type is checked, extension types and
unknown versions are refused with a reason.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, NewType

import msgpack
import numpy as np
import numpy.typing as npt

from lmpool.errors import JobFormatError, RowFormatError
from lmpool.model_info import Encoding

Digest = NewType("Digest", bytes)
"""16 bytes, blake2b-128: the identity of a result."""

Operation = Literal["logprobs", "sample"]

JOB_VERSION: Final = 1
ROW_VERSION: Final = 1
DIGEST_BYTES: Final = 16
MAX_JOB_BYTES: Final = 8 << 20
MAX_EOS_IDS: Final = 256

_WANTED: Final[dict[str, dict[str, tuple[type, ...]]]] = {
    "logprobs": {"encoding": (str,)},
    "sample": {
        "max_tokens": (int,),
        "eos": (list,),
        "temperature": (float, int),
        "seed": (int,),
    },
}


# --- jobs --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and what is wanted of it.

    `tokens` are the prompt's ids as little-endian uint32 bytes. `adapter` is ``name@fingerprint``.
    `deadline` and `sent` are milliseconds of the server's clock.
    """

    op: Operation
    digest: Digest
    tokens: bytes
    adapter: str | None
    want: Mapping[str, Any]
    deadline: int | None = None
    sent: int = 0

    def token_ids(self) -> npt.NDArray[np.uint32]:
        """The prompt, uint32 [length], read-only."""
        return np.frombuffer(self.tokens, dtype="<u4")


def pack_job(job: Job) -> bytes:
    """A job as the msgpack map that the stream carries."""
    packed: bytes = msgpack.packb(
        {
            "v": JOB_VERSION,
            "op": job.op,
            "digest": job.digest,
            "tokens": job.tokens,
            "adapter": job.adapter,
            "want": job.want,
            "deadline": job.deadline,
            "sent": job.sent,
        }
    )
    return packed


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
        found: Any = msgpack.unpackb(data, strict_map_key=True, ext_hook=_refuse_extension)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise JobFormatError(f"not msgpack: {error or type(error).__name__}") from None
    if not isinstance(found, dict):
        raise JobFormatError(f"a {type(found).__name__} instead of a map")
    digest = found.get("digest")
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise JobFormatError("no digest of 16 bytes")
    try:
        problem = _job_problem(found)
    except RecursionError:  # of a message about it
        problem = "fields nested too deeply"
    if problem:
        raise RefusedJob(problem, Digest(digest))
    return Job(
        op=found["op"],
        digest=Digest(digest),
        tokens=found["tokens"],
        adapter=found["adapter"],
        want=found["want"],
        deadline=found["deadline"],
        sent=found["sent"],
    )


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _job_problem(found: dict[str, Any]) -> str | None:
    """Why this map is no job of ours, or None."""
    if found.get("v") != JOB_VERSION:
        return f"job version {found.get('v')!r:.40}: this worker reads version {JOB_VERSION}"
    tokens, want, op = found.get("tokens"), found.get("want"), found.get("op")
    wanted = _WANTED.get(op) if isinstance(op, str) else None
    if wanted is None:
        return f"unknown operation {op!r:.40}"
    if not isinstance(tokens, bytes) or not tokens or len(tokens) % 4:
        return "tokens are not a positive number of uint32"
    if not isinstance(want, dict) or want.keys() != wanted.keys():
        return f"{op} wants exactly {sorted(wanted)}, not {want!r:.100}"
    for name, types in wanted.items():
        if type(want[name]) not in types:
            return f"{name}={want[name]!r:.100} of the wrong type"
    if op == "sample" and (
        len(want["eos"]) > MAX_EOS_IDS or any(type(i) is not int for i in want["eos"])
    ):
        return f"eos is not a list of at most {MAX_EOS_IDS} integers"
    if op == "logprobs" and want["encoding"] not in _ENTRY_BYTES:
        return f"unknown encoding {want['encoding']!r:.40}"
    adapter, deadline = found.get("adapter", 0), found.get("deadline", "")
    if not (adapter is None or (isinstance(adapter, str) and 0 < len(adapter) <= 512)):
        return "adapter is neither nil nor a name"
    if not (deadline is None or type(deadline) is int) or type(found.get("sent")) is not int:
        return "deadline or sent is not a number of milliseconds"
    return None


class Digester:
    """Digests of one model's jobs: blake2b-128 over all that changes the result."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._plain: dict[tuple[str | None, str], Any] = {}

    def logprobs(self, tokens: bytes, encoding: Encoding, adapter: str | None = None) -> Digest:
        """The digest of a row; `adapter` is ``name@fingerprint``."""
        # Rows differ by their tokens alone: the hash of all else is kept and copied.
        started = self._plain.get((adapter, encoding))
        if started is None:
            if len(self._plain) >= 1024:
                self._plain.clear()
            started = self._start("logprobs", {"encoding": encoding}, adapter)
            self._plain[adapter, encoding] = started
        hasher = started.copy()
        hasher.update(tokens)
        return Digest(hasher.digest())

    def job(self, op: str, tokens: bytes, want: Mapping[str, Any], adapter: str | None) -> Digest:
        """The digest of any job."""
        if op == "logprobs":
            return self.logprobs(tokens, want["encoding"], adapter)
        hasher = self._start(op, want, adapter)
        hasher.update(tokens)
        return Digest(hasher.digest())

    def _start(self, op: str, want: Mapping[str, Any], adapter: str | None) -> Any:
        # One msgpack value delimits itself, so that no choice of fields can run into the tokens.
        adapter_fingerprint = None if adapter is None else adapter.rpartition("@")[2]
        head = [self._fingerprint, adapter_fingerprint, op, sorted(want.items())]
        return hashlib.blake2b(msgpack.packb(head), digest_size=DIGEST_BYTES)


# --- rows --------------------------------------------------------------------------------------

RowEncoding = Literal["f32", "bf16", "f16", "u32"]

_ENTRY_BYTES: Final[dict[str, int]] = {"f32": 4, "bf16": 2, "f16": 2}
_MAX_HEADER: Final = 64

ROW_HEADER_BYTES: Final = 24
"""Length of the header we write. Its msgpack forms are chosen so that the numbers after it are
aligned to their size, and a row can be used in place."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A decoded header and the numbers behind it, not copied.

    For ``f32``, ``bf16`` and ``f16`` the row is ``float32(data) - scale``; ``u32`` holds sampled
    token ids, and `size` their number.
    """

    encoding: RowEncoding
    size: int
    scale: float
    data: npt.NDArray[Any] = field(repr=False)

    def logprobs(self) -> npt.NDArray[np.float32]:
        """Log-probabilities, float32 [vocab_size], normalized.

        Read-only and without a copy for ``f32``; a fresh array otherwise.
        """
        if self.encoding == "f32":
            return self.data
        if self.encoding == "bf16":
            values = bf16_to_f32(self.data)
        elif self.encoding == "f16":
            values = self.data.astype(np.float32)
        else:
            raise RowFormatError("a row of sampled tokens where log-probabilities were expected")
        values -= np.float32(self.scale)
        return values

    def token_ids(self) -> list[int]:
        """Sampled token ids."""
        if self.encoding != "u32":
            raise RowFormatError(f"a row in {self.encoding} where sampled tokens were expected")
        ids: list[int] = self.data.tolist()
        return ids


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The float32 values of bfloat16 bits: uint16 [n] -> float32 [n], exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


_HEADERS: Final[dict[str, bytes]] = {
    # array16 of 5, version, encoding: 9 bytes in either spelling.
    "f32": b"\xdc\x00\x05\xcc\x01\xa3f32",
    "f16": b"\xdc\x00\x05\xcc\x01\xa3f16",
    "u32": b"\xdc\x00\x05\xcc\x01\xa3u32",
    "bf16": b"\xdc\x00\x05\x01\xa4bf16",
}
_NUMBERS: Final = struct.Struct(">BIBfBI")  # uint32 size, float32 scale, bin32 length


@cache
def _f32_header(size: int) -> bytes:
    return _HEADERS["f32"] + _NUMBERS.pack(0xCE, size, 0xCA, 0.0, 0xC6, 4 * size)


def pack_values(encoding: RowEncoding, values: npt.NDArray[Any], scale: float = 0.0) -> bytes:
    """A row of raw numbers: `values` is [size], of the encoding's dtype, C-contiguous."""
    header = _HEADERS[encoding] + _NUMBERS.pack(0xCE, values.size, 0xCA, scale, 0xC6, values.nbytes)
    return b"".join((header, values.data))


def pack_logprobs(row: npt.NDArray[np.float32], encoding: Literal["f32", "f16"] = "f32") -> bytes:
    """Log-probabilities, float32 [vocab_size], as a row. ``f16`` loses precision."""
    if encoding == "f32":
        values = np.ascontiguousarray(row, dtype="<f4")
        return b"".join((_f32_header(values.size), values.data))
    with np.errstate(over="ignore"):  # what is below its range is impossible anyway: -inf
        narrow = np.ascontiguousarray(row, dtype="<f2")
    # Rounding moves the sum: the scale puts the row back on exp sums to 1.
    return pack_values("f16", narrow, _logsumexp(narrow.astype(np.float32)))


def _logsumexp(values: npt.NDArray[np.float32]) -> float:
    top = float(values.max())
    return top + float(np.log(np.exp(values - np.float32(top), dtype=np.float32).sum(dtype="f8")))


def pack_tokens(tokens: npt.NDArray[np.uint32]) -> bytes:
    """Sampled token ids, uint32 [n], as a row."""
    return pack_values("u32", np.ascontiguousarray(tokens, dtype="<u4"))


_DTYPES: Final[dict[str, str]] = {"f32": "<f4", "bf16": "<u2", "f16": "<f2", "u32": "<u4"}
_F32: Final = np.dtype("<f4")


def unpack_row(data: bytes, size: int | None = None) -> Row:
    """Read a row without copying its numbers; `size` is the vocabulary size it must have.

    Raises `RowFormatError` for another version, a cut or overlong row, or one of another size.
    """
    # Nearly every row has the header we write: one comparison instead of eight steps.
    if size is not None and data[:ROW_HEADER_BYTES] == _f32_header(size):
        _check_length(data, ROW_HEADER_BYTES, size, "f32", _F32)
        return Row("f32", size, 0.0, np.frombuffer(data, _F32, size, ROW_HEADER_BYTES))
    unpacker = msgpack.Unpacker(max_buffer_size=_MAX_HEADER, ext_hook=_refuse_extension)
    unpacker.feed(data[:_MAX_HEADER])
    try:
        fields = unpacker.read_array_header()
        version = unpacker.unpack() if fields else None
        if type(version) is not int or version != ROW_VERSION:
            raise RowFormatError(
                f"a row of version {version!r}: this lmpool reads version {ROW_VERSION}; "
                "install the lmpool that the pool's workers run"
            )
        encoding, found, scale = unpacker.unpack(), unpacker.unpack(), unpacker.unpack()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        if isinstance(error, RowFormatError):
            raise
        raise RowFormatError(f"not a row: {error or type(error).__name__}") from None
    if fields != 5 or not isinstance(encoding, str) or encoding not in _DTYPES:
        raise RowFormatError(f"a row of {fields} fields in encoding {encoding!r:.40}")
    if type(found) is not int or (size is not None and encoding != "u32" and found != size):
        raise RowFormatError(f"a row of {found!r:.40} entries where {size} were expected")
    if type(scale) not in (float, int):
        raise RowFormatError(f"a row with scale {scale!r:.40}")
    start, length = _bin_header(data, unpacker.tell())
    dtype = np.dtype(_DTYPES[encoding])
    _check_length(data, start, found, encoding, dtype)
    if length != found * dtype.itemsize:
        raise RowFormatError(f"a row of {found} entries that says to take {length} bytes")
    values = np.frombuffer(data, dtype=dtype, count=found, offset=start)
    return Row(encoding, found, float(scale), values)  # type: ignore[arg-type]


def _check_length(
    data: bytes, start: int, entries: int, encoding: str, dtype: np.dtype[Any]
) -> None:
    if len(data) != start + entries * dtype.itemsize:
        raise RowFormatError(
            f"a row cut short or overlong: {len(data) - start} bytes behind the header where "
            f"{entries} entries in {encoding} take {entries * dtype.itemsize}"
        )


def _bin_header(data: bytes, at: int) -> tuple[int, int]:
    """Where a msgpack bin at offset `at` starts, and its length."""
    kind = data[at : at + 1]
    width = {b"\xc4": 1, b"\xc5": 2, b"\xc6": 4}.get(kind)
    if width is None or len(data) < at + 1 + width:
        raise RowFormatError("a row without its numbers")
    return at + 1 + width, int.from_bytes(data[at + 1 : at + 1 + width], "big")


# --- notices -----------------------------------------------------------------------------------

Status = Literal["ok", "failed", "expired", "refused", "unknown_adapter"]


@dataclass(frozen=True, slots=True)
class Notice:
    """What became of one digest (32 hex digits): the row is there, or an error."""

    digest: bytes
    status: str
    error: str = ""


def read_notices(fields: Mapping[bytes, bytes]) -> list[Notice]:
    """The notices in one entry of a reply stream; an entry that is no notice gives none.

    ``ok`` holds any number of digests, 32 hex digits each; an error comes alone, as ``digest``,
    ``status`` and ``error``.
    """
    done = fields.get(b"ok")
    if done is not None:
        whole = len(done) - len(done) % 32
        return [Notice(done[i : i + 32], "ok") for i in range(0, whole, 32)]
    digest, status = fields.get(b"digest", b""), fields.get(b"status", b"")
    if len(digest) != 32 or not status:
        return []
    error = fields.get(b"error", b"").decode("utf-8", "replace")
    return [Notice(digest, status.decode("utf-8", "replace"), error)]

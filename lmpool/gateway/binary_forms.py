"""Answers as .npy, msgpack and JSON: what docs/gateway.md, *Binary answers*, says of each."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt
import orjson

from lmpool.gateway.errors import TYPES, ApiError
from lmpool.gateway.prompt_logprobs_json import IMPOSSIBLE
from lmpool.wants import Draws, TextScores, TopLogprobs, Want
from lmpool.wants.draw import MAX_DRAWS

Fields: TypeAlias = dict[str, npt.NDArray[Any]]
"""The arrays of an answer by name: int32 or float32, little-endian."""
Found: TypeAlias = "Fields | ApiError"

JSON: Final = "application/json"
NPY: Final = "application/x-npy"
MSGPACK: Final = "application/msgpack"
EVENTS: Final = "text/event-stream"
ERRORS_HEADER: Final = "x-lmpool-errors"
_ALIASES: Final = {
    "*/*": JSON,
    "application/*": JSON,
    JSON: JSON,
    EVENTS: JSON,
    NPY: NPY,
    MSGPACK: MSGPACK,
    "application/x-msgpack": MSGPACK,
    "application/vnd.msgpack": MSGPACK,
}
_MOST_HEADER: Final = 4096
"""Characters of errors in a header."""
_POSITIONS: Final = frozenset({"score"})
"""Wants whose answers have a first axis for the positions of a text."""


def fields_of(want: Want, answer: object) -> Fields:
    """The arrays of a want's answer, by the names that lmpool's own answers have."""
    match answer:
        case TopLogprobs():
            return {"token_ids": answer.token_ids, "logprobs": answer.logprobs, **_rest(answer)}
        case TextScores():
            found: Fields = {"logprobs": answer.logprobs, "ranks": answer.ranks}
            top = answer.top_logprobs
            if top is not None:
                found |= {"top_token_ids": top.token_ids, "top_logprobs": top.logprobs}
                found |= _rest(top)
            if answer.token_logprobs is not None:
                found["token_logprobs"] = answer.token_logprobs
            return found
        case Draws():
            return {
                "token_ids": answer.token_ids,
                "logprobs": answer.logprobs,
                "proposal_logprobs": answer.proposal_logprobs,
                "log_mass": np.asarray(answer.log_mass, np.float32),
            }
        case np.ndarray():  # a row, log-probabilities of tokens, or a hidden state
            return {"state" if want.kind == "hidden" else "logprobs": answer}
        case _:
            raise TypeError(f"no form for a {type(answer).__name__}")


def _rest(top: TopLogprobs) -> Fields:
    return {"rest": np.asarray(top.rest, np.float32)}


def answer_bytes(want: Want, tokens: int, vocab_size: int, hidden_size: int) -> int:
    """Of the answer to a want of a prompt of so many tokens, in binary. What cannot be asked is no
    more than what can."""
    match want.kind:
        case "row":
            return 4 * vocab_size
        case "score":
            width = _width(want)
            likely = min(want.top_logprobs, vocab_size)  # type: ignore[union-attr]
            return max(0, tokens - want.start) * (12 + 8 * likely + 4 * width)  # type: ignore[union-attr]
        case "top":
            return 8 * min(want.k, vocab_size) + 4  # type: ignore[union-attr]
        case "draw":
            return 12 * min(want.n, MAX_DRAWS) + 4  # type: ignore[union-attr]
        case "hidden":
            return 4 * hidden_size
        case _:
            return 4 * len(want.token_ids)  # type: ignore[union-attr, arg-type]


def _width(want: Any) -> int:
    ids = want.token_ids
    if ids is None:
        return 0
    return len(ids[0]) if ids and isinstance(ids[0], list) else len(ids)


def error_body(error: ApiError) -> dict[str, Any]:
    """An error where an answer would be, as in OpenAI's API, with its status."""
    return {
        "message": error.message,
        "type": TYPES.get(error.status, "invalid_request_error"),
        "param": error.param,
        "code": error.code,
        "status": error.status,
    }


# --- which one -----------------------------------------------------------------------------------


def accepted(header: str | None) -> str:
    """The media type that an ``Accept`` asks for most. Raises `ApiError` where there is none."""
    if header is None or not header.strip():
        return JSON
    best, most = None, 0.0
    for part in header.split(","):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                weight = _quality(parameter[2:])
        if name in _ALIASES and weight > most:
            best, most = _ALIASES[name], weight
    if best is None:
        raise ApiError(
            400, f"Accept: {header[:80]!r}: there are {JSON}, {NPY} and {MSGPACK}", param="accept"
        )
    return best


def _quality(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        return 0.0
    return found if 0 <= found <= 1 else 0.0


class Form(Protocol):
    """A way to write answers."""

    media_type: str
    """Of all answers together."""
    stream_type: str
    """Of answers that come one after another."""

    def check(self, wants: Sequence[Want]) -> None:
        """Refuse wants that it cannot write. Raises `ApiError`."""
        ...

    def all(self, found: Sequence[Found]) -> tuple[bytes, dict[str, str]]:
        """All answers in the order of their prompts, and headers."""
        ...

    def one(self, index: int, found: Found) -> bytes:
        """One of a stream."""
        ...

    def end(self, error: ApiError | None) -> bytes:
        """What ends a stream."""
        ...


# --- JSON ----------------------------------------------------------------------------------------


class JsonForm:
    """One object, or server-sent events. -inf, which JSON does not have, is -9999.0."""

    media_type = JSON
    stream_type = EVENTS

    def __init__(self, model: str) -> None:
        self._model = model

    def check(self, wants: Sequence[Want]) -> None:
        """It writes all."""

    def all(self, found: Sequence[Found]) -> tuple[bytes, dict[str, str]]:
        """An object with a list, ``data``."""
        data = b",".join(_as_json(index, each) for index, each in enumerate(found))
        head = json.dumps({"object": "list", "model": self._model})[:-1].encode()
        return b"".join((head, b',"data":[', data, b"]}")), {}

    def one(self, index: int, found: Found) -> bytes:
        """An event."""
        return b"data: " + _as_json(index, found) + b"\n\n"

    def end(self, error: ApiError | None) -> bytes:
        """The event that ends all streams of the API."""
        done = b"data: [DONE]\n\n"
        return done if error is None else b"data: " + error.body() + b"\n\n" + done


def _as_json(index: int, found: Found) -> bytes:
    if isinstance(found, ApiError):
        return json.dumps({"index": index, "error": error_body(found)}).encode()
    sound = {name: _finite(array) for name, array in found.items()}
    return orjson.dumps({"index": index, **sound}, option=orjson.OPT_SERIALIZE_NUMPY)


def _finite(array: npt.NDArray[Any]) -> npt.NDArray[Any] | float:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        array = np.where(np.isfinite(array), array, np.float32(IMPOSSIBLE))
    return np.ascontiguousarray(array) if array.ndim else array[()]


# --- msgpack -------------------------------------------------------------------------------------


class MsgpackForm:
    """A list of maps, or maps one after another; arrays are their bytes, little-endian."""

    media_type = MSGPACK
    stream_type = MSGPACK

    def check(self, wants: Sequence[Want]) -> None:
        """It writes all."""

    def all(self, found: Sequence[Found]) -> tuple[bytes, dict[str, str]]:
        """One list."""
        head: bytes = msgpack.Packer().pack_array_header(len(found))
        return b"".join([head, *(self.one(i, each) for i, each in enumerate(found))]), {}

    def one(self, index: int, found: Found) -> bytes:
        """One map."""
        packer = msgpack.Packer(use_single_float=True, autoreset=True)
        if isinstance(found, ApiError):
            return bytes(packer.pack({"index": index, "error": error_body(found)}))
        values = {name: _packable(array) for name, array in found.items()}
        return bytes(packer.pack({"index": index, **values}))

    def end(self, error: ApiError | None) -> bytes:
        """Nothing; an error that ends all is a map without an index."""
        return b"" if error is None else bytes(msgpack.packb({"error": error_body(error)}))


def _packable(array: npt.NDArray[Any]) -> object:
    if not array.ndim:
        return array.item()
    return _little(array).data.cast("B")


# --- .npy ----------------------------------------------------------------------------------------


class NpyForm:
    """One array, or arrays one after another, each as `numpy.save` writes it."""

    media_type = NPY
    stream_type = NPY

    def __init__(self, wants: Sequence[Want]) -> None:
        self._wants = wants

    def check(self, wants: Sequence[Want]) -> None:
        """One kind of want. Raises `ApiError` for several, and for answers of unequal lengths."""
        kinds = {want.kind for want in wants}
        if len(kinds) > 1:
            raise ApiError(
                400,
                f"want: {', '.join(sorted(kinds))} in one array: ask for one kind, or with "
                f"Accept: {MSGPACK}",
                param="want",
            )

    def all(self, found: Sequence[Found]) -> tuple[bytes, dict[str, str]]:
        """One array of all: a line for each prompt, or of scores for each position."""
        headers = _errors_header(found)
        answers = [(i, each) for i, each in enumerate(found) if not isinstance(each, ApiError)]
        if not answers:
            raise next(each for each in found if isinstance(each, ApiError))
        if self._wants[0].kind in _POSITIONS:
            parts = [self._positions(i, each) for i, each in answers]
            _one_type([part.dtype for part in parts])
            return _npy(parts[0].dtype, sum(map(len, parts)), parts), headers
        _one_type([_line_type(each) for _, each in answers])
        first = answers[0][1]
        if len(first) == 1:
            (name,) = first
            missing = np.full(first[name].shape, np.nan, np.float32)
            lines = [missing if isinstance(each, ApiError) else each[name] for each in found]
            return _npy(np.dtype("<f4"), (len(found), *missing.shape), lines), headers
        table = np.empty(len(found), _line_type(first))
        for line, each in zip(table, found, strict=True):
            for name, array in (_missing(first) if isinstance(each, ApiError) else each).items():
                line[name] = array
        return _npy(table.dtype, len(table), [table]), headers

    def one(self, index: int, found: Found) -> bytes:
        """An array whose lines begin with their prompt's ``index``."""
        if isinstance(found, ApiError):
            text = found.message[:1000]
            kind = np.dtype([("index", "<i4"), ("status", "<i4"), ("error", f"<U{len(text) or 1}")])
            error = np.array([(index, found.status, text)], kind)
            return _npy(kind, 1, [error])
        if self._wants[index].kind in _POSITIONS:
            lines = self._positions(index, found)
        else:
            lines = np.empty(1, [("index", "<i4"), *_line_type(found).descr])
            lines["index"] = index
            for name, array in found.items():
                lines[name] = array
        return _npy(lines.dtype, len(lines), [lines])

    def end(self, error: ApiError | None) -> bytes:
        """Nothing; an error that ends all is one of no prompt: index -1."""
        return b"" if error is None else self.one(-1, error)

    def _positions(self, index: int, found: Fields) -> npt.NDArray[Any]:
        """A line for each position of a text."""
        count = len(found["logprobs"])
        inner = [(n, _kind(array), array.shape[1:]) for n, array in found.items()]
        lines = np.empty(count, [("index", "<i4"), ("position", "<i4"), *inner])
        start = self._wants[index].start  # type: ignore[union-attr]
        lines["index"], lines["position"] = index, np.arange(start, start + count)
        for name, array in found.items():
            lines[name] = array
        return lines


def _kind(array: npt.NDArray[Any]) -> str:
    return "<i4" if array.dtype.kind in "iu" else "<f4"


def _line_type(found: Fields) -> np.dtype[Any]:
    return np.dtype([(name, _kind(array), array.shape) for name, array in found.items()])


def _missing(like: Fields) -> Fields:
    """What stands for an answer that there is not: nan, and -1 for ids."""
    return {
        name: np.full(array.shape, -1 if array.dtype.kind in "iu" else np.nan, array.dtype)
        for name, array in like.items()
    }


def _one_type(kinds: Iterable[np.dtype[Any]]) -> None:
    if len(set(kinds)) > 1:
        raise ApiError(
            400,
            "want: answers of unequal lengths in one array: ask for as many numbers of each "
            f"prompt, or with Accept: {MSGPACK}",
            param="want",
        )


def _npy(
    kind: np.dtype[Any], shape: int | tuple[int, ...], parts: Iterable[npt.NDArray[Any]]
) -> bytes:
    """An array whose parts stand one after another, as `numpy.save` writes it."""
    head = io.BytesIO()
    described = {
        "descr": np.lib.format.dtype_to_descr(kind),
        "fortran_order": False,
        "shape": shape if isinstance(shape, tuple) else (shape,),
    }
    np.lib.format.write_array_header_1_0(head, described)
    return b"".join([head.getvalue(), *_buffers(parts)])


def _buffers(parts: Iterable[npt.NDArray[Any]]) -> Iterator[memoryview]:
    for part in parts:
        if part.size:
            yield _little(part).view(np.uint8).data.cast("B")


def _little(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """As it travels: little-endian, one number after another."""
    kind = array.dtype if array.dtype.names else np.dtype(_kind(array))
    return np.ascontiguousarray(array, kind)


def _errors_header(found: Sequence[Found]) -> dict[str, str]:
    """The errors of prompts by number, as far as they fit, as ASCII without line ends."""
    errors: dict[str, Mapping[str, Any]] = {}
    text = ""
    for number, each in enumerate(found):
        if isinstance(each, ApiError):
            errors[str(number)] = error_body(each)
            longer = json.dumps(errors)
            if len(longer) > _MOST_HEADER:
                break
            text = longer
    return {ERRORS_HEADER: text} if text else {}

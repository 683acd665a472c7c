"""Log-probabilities of a text's tokens as JSON, as vLLM and OpenAI's answers write them.

The numbers of an answer are hundreds of thousands, and a Python object for each takes longer than
the model does. Here each entry is a line of a byte matrix: the token's text, which was escaped once
for all of the vocabulary, its number, its rank. Lines are multiples of 8 bytes, filled up with
spaces between what JSON separates; one selection of words then leaves out what is too much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from json.encoder import encode_basestring
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import orjson

from lmpool.gateway.words import Words
from lmpool.wants import TextScores, TopLogprobs

IMPOSSIBLE: Final = -9999.0
"""What stands for the log-probability of what is impossible: JSON has no -inf."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ids: TypeAlias = npt.NDArray[np.int32]
Logprobs: TypeAlias = npt.NDArray[np.float32]
Mask: TypeAlias = npt.NDArray[np.bool_]

_WORD: Final = 8
_NUMBER: Final = 16
"""Bytes of a number's place: float32 in the fewest digits that give it back have 15 at most."""
_SPACE: Final = 0x20
_COMMA: Final = 0x2C
_WIDEST: Final = 96
"""Bytes of a line's text in the table of all. The few that are longer stand by themselves."""
_TOGETHER: Final = 1 << 16
"""Entries that are written at once."""
_SMALL_RANKS: Final = 1024
_RANK: Final = 16
_LONG_RANK: Final = 24
"""Bytes of a rank's place where one has more than seven digits."""
_TAIL: Final = 24
"""Bytes of what ends an entry of a chat."""
_BEGIN_OF_LIKELY: Final = np.frombuffer(b',"top_logprobs":['.ljust(_TAIL), np.uint8)
_END_OF_LIKELY: Final = np.frombuffer(b"}".ljust(_TAIL), np.uint8)


# --- numbers -----------------------------------------------------------------------------------


def _filling(kept: int, left: int) -> npt.NDArray[np.uint64]:
    """By a number's length: what of its place it has (`kept`), and what else stands there."""
    lines = [bytes([kept]) * size + bytes([left]) * (_NUMBER - size) for size in range(_NUMBER + 1)]
    return np.frombuffer(b"".join(lines), np.uint64).reshape(_NUMBER + 1, 2)


_KEEP: Final = _filling(0xFF, 0)
_FILL: Final = _filling(0, _SPACE)
_PLACE: Final = np.dtype(f"V{_NUMBER}")


def number_places(values: Logprobs, least: float = -np.inf) -> Bytes:
    """float32 [n] as JSON, uint8 [n, 16]: each from the left, spaces behind it.

    In the fewest digits that give the same float32; `IMPOSSIBLE` for what is not finite, and
    `least` for what is less.
    """
    count = values.size
    if not count:
        return np.empty((0, _NUMBER), np.uint8)
    with np.errstate(invalid="ignore"):
        found = np.where(np.isfinite(values), np.maximum(values, least), IMPOSSIBLE)
    text = orjson.dumps(found.astype(np.float32), option=orjson.OPT_SERIALIZE_NUMPY)
    # "[1.5,2.5]": a place begins behind each comma, and may reach beyond the last number.
    data = np.frombuffer(text + b" " * _NUMBER, np.uint8)
    starts = np.empty(count, np.intp)
    starts[0] = 1
    starts[1:] = np.flatnonzero(data[: len(text)] == _COMMA) + 1
    lengths = np.diff(starts, append=len(text)) - 1
    every = np.ndarray((len(text),), _PLACE, data, strides=(1,))
    places: npt.NDArray[np.uint64] = every.take(starts).view(np.uint64).reshape(count, 2)
    places &= _KEEP.take(lengths, axis=0)
    places |= _FILL.take(lengths, axis=0)
    return places.view(np.uint8)


def numbers_json(values: Logprobs, least: float = -np.inf) -> bytes:
    """float32 [n] as a JSON list, without its brackets; see `number_places`."""
    places = number_places(values, least)
    if not len(places):
        return b""
    lines = np.empty((len(places), _NUMBER + 1), np.uint8)
    lines[:, :_NUMBER] = places
    lines[:, _NUMBER] = _COMMA
    return lines.tobytes()[:-1].replace(b" ", b"")


# --- texts -------------------------------------------------------------------------------------


class _Lines:
    """The beginning of an entry, for every token: uint8, in whole words."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        longest = max(map(len, lines), default=0)
        self._width = _WORD * -(-min(longest, _WIDEST) // _WORD)
        self._long = {i: line for i, line in enumerate(lines) if len(line) > self._width}
        padded = b"".join([line[: self._width].ljust(self._width) for line in lines])
        self._table = np.frombuffer(padded, np.uint8).reshape(len(lines), self._width)
        sizes = np.fromiter(map(len, lines), np.int32, len(lines))
        self._words = -(-sizes // _WORD)

    def of(self, ids: Ids, behind: int) -> tuple[Bytes, Mask]:
        """Those of `ids` [n], with so many bytes more behind each: uint8 [n, bytes]; and which
        words of them count, bool [n, words]."""
        words = self._words.take(ids)
        width = self._width
        if self._long:
            width = max(width, _WORD * int(words.max(initial=0)))
        lines = np.empty((ids.size, width + behind), np.uint8)
        lines[:, : self._width] = self._table.take(ids, axis=0)
        if width > self._width:
            for place in np.flatnonzero(words * _WORD > self._width):
                line = self._long[int(ids[place])]
                lines[place, : len(line)] = np.frombuffer(line, np.uint8)
                lines[place, len(line) : width] = _SPACE
        counts = np.empty((ids.size, (width + behind) // _WORD), np.bool_)
        counts[:, : width // _WORD] = np.arange(width // _WORD) < words[:, None]
        counts[:, width // _WORD :] = True
        return lines, counts


class TokenTexts:
    """The texts of a vocabulary, by id, and as JSON: made once for a model.

    What is no text in UTF-8, a lone surrogate, is U+FFFD to every reader. `named` is False where
    nobody knows what the tokens stand for.
    """

    def __init__(
        self, texts: Sequence[str], named: bool = True, spelled: Sequence[bytes] = ()
    ) -> None:
        self.texts = list(map(_sound, texts))
        self.named = named
        self._spelled = spelled

    def text(self, token: int) -> str:
        """That of one token."""
        return self.texts[token]

    @cached_property
    def entries(self) -> _Lines:
        """Of vLLM's ``prompt_logprobs``. The first bytes are those that part two entries."""
        if not self.named:
            nothing = b'  ,"%d":{"decoded_token":null,"logprob":'
            return _Lines([nothing % token for token in range(len(self.texts))])
        entry = b'  ,"%d":{"decoded_token":%b,"logprob":'
        return _Lines([entry % (i, _quoted(text)) for i, text in enumerate(self.texts)])

    @cached_property
    def tokens(self) -> _Lines:
        """Of the ``content`` of chats, with each token's own bytes."""
        blank = [b""] * (len(self.texts) - len(self._spelled))
        every = zip(self.texts, [*self._spelled, *blank], strict=False)
        entry = b'  ,{"token":%b,"bytes":[%b],"logprob":'
        return _Lines([entry % (_quoted(t), ",".join(map(str, s)).encode()) for t, s in every])

    @cached_property
    def keys(self) -> _Lines:
        """Of the ``top_logprobs`` of completions."""
        return _Lines([b"  ,%b:" % _quoted(text) for text in self.texts])

    @cached_property
    def alike(self) -> Ids:
        """For each token the first one that has the same text."""
        first: dict[str, int] = {}
        found = (first.setdefault(text, i) for i, text in enumerate(self.texts))
        return np.fromiter(found, np.int32, len(self.texts))


_KNOWN: Final[WeakKeyDictionary[Words, dict[bool, TokenTexts]]] = WeakKeyDictionary()


def texts_of(words: Words, as_ids: bool = False) -> TokenTexts:
    """The texts of a model's tokens, or ``token_id:N`` for each: made at the first call."""
    known = _KNOWN.setdefault(words, {})
    if as_ids not in known:
        numbered = as_ids or not words.has_text
        texts = [f"token_id:{i}" for i in range(len(words.texts))] if numbered else words.texts
        known[as_ids] = TokenTexts(texts, not numbered, words.tokens)
    return known[as_ids]


def prepare(words: Words) -> None:
    """Make what is made once for a model: tenths of a second for a large vocabulary."""
    texts = texts_of(words)
    for table in ("entries", "tokens", "keys", "alike"):
        getattr(texts, table)


def _sound(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= each <= "\udfff" else each for each in text)
    return text


def _quoted(text: str) -> bytes:
    found: str = encode_basestring(text)
    return found.encode()


# --- entries -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTokens:
    """Tokens of a text or of a continuation, one after another: `token_ids` int32 [T], `logprobs`
    float32 [T], and the likeliest of each position, [T, k], where they were asked for."""

    token_ids: Ids
    logprobs: Logprobs
    top: TopLogprobs | None = None

    def __len__(self) -> int:
        return self.token_ids.size

    @property
    def width(self) -> int:
        """Entries of a position: the token's own, and the likeliest."""
        return 1 if self.top is None else 1 + self.top.token_ids.shape[1]

    def entries(self) -> tuple[Ids, Logprobs, Mask]:
        """Ids, numbers, and which count, [T, 1 + k]: the token's own first, which is left out of
        the likeliest where it is one of them. Its number is then the one that it has there."""
        own = self.logprobs
        if self.top is None:
            return self.token_ids[:, None], own[:, None], np.ones((len(self), 1), np.bool_)
        same = self.top.token_ids == self.token_ids[:, None]
        count = np.empty((len(self), self.width), np.bool_)
        count[:, 0], count[:, 1:] = True, ~same
        inside, at = same.any(axis=1), same.argmax(axis=1)
        there = self.top.logprobs[np.arange(len(self)), at]
        numbers = np.concatenate(
            [np.where(inside, there, own)[:, None], self.top.logprobs], axis=1, dtype=np.float32
        )
        ids = np.concatenate([self.token_ids[:, None], self.top.token_ids], axis=1, dtype=np.int32)
        return ids, numbers, count

    def parts(self) -> Iterator[slice]:
        """Positions, so many as are written at once."""
        each = max(1, _TOGETHER // self.width)
        return (slice(at, at + each) for at in range(0, len(self), each))

    def part(self, positions: slice) -> ScoredTokens:
        """These positions alone."""
        top = self.top
        if top is not None:
            rest = np.asarray(top.rest, np.float32)[positions]
            top = TopLogprobs(top.token_ids[positions], top.logprobs[positions], rest)
        return ScoredTokens(self.token_ids[positions], self.logprobs[positions], top)


def prompt_logprobs(
    words: Words, token_ids: Sequence[int] | Ids, scores: TextScores | None
) -> bytes:
    """vLLM's ``prompt_logprobs`` of a prompt: null for the first token, then an object for each,
    its own entry first and then the likeliest others.

    `scores` are those from position 1 on; None of a prompt of one token. A rank says how many
    tokens have at least the log-probability; of the likeliest, how many of them, and the token
    itself: what ties with the last of them and is not there nobody counts.
    """
    if scores is None or not len(scores.logprobs):
        return b"[null]"
    texts = texts_of(words)
    own = np.asarray(token_ids, np.int32)[1:]
    scored = ScoredTokens(own, scores.logprobs, scores.top_logprobs)
    found: list[bytes | memoryview] = [b"[null,"]
    for number, positions in enumerate(scored.parts()):
        part = scored.part(positions)
        ids, numbers, count = part.entries()
        ranks = _ranks(numbers, scores.ranks[positions])
        data = _written(texts.entries, ids, numbers, count, ranks)
        # What parts it from the position before there is not before the first.
        found.append(data.data if number else data[2:].data)
    return b"".join([*found, b"}]"])


def _written(
    lines_of: _Lines,
    ids: Ids,
    numbers: Logprobs,
    count: Mask,
    ranks: Ids | None = None,
    least: float = -np.inf,
) -> Bytes:
    """Entries of some positions, all [T, width], as bytes; each position begins with ``},{``."""
    positions, width = ids.shape
    tails = None if ranks is None else _rank_places(ranks.reshape(-1))
    behind = _NUMBER + (0 if tails is None else tails.shape[1])
    lines, counts = lines_of.of(ids.reshape(-1), behind)
    text = lines.shape[1] - behind
    lines[:, text : text + _NUMBER] = number_places(numbers.reshape(-1), least)
    if tails is not None:
        lines[:, text + _NUMBER :] = tails
    lines.reshape(positions, width, -1)[:, 0, :3] = np.frombuffer(b"},{", np.uint8)
    counts &= count.reshape(-1, 1)
    chosen: Bytes = lines.view(np.uint64)[counts].view(np.uint8)
    return chosen


def _ranks(numbers: Logprobs, own: npt.NDArray[np.int32]) -> Ids:
    """How many tokens have at least each number, int32 [T, 1 + k]; the token's own are known."""
    positions, width = numbers.shape
    ranks = np.empty((positions, width), np.int32)
    ranks[:, 0] = own
    if width == 1:
        return ranks
    top = numbers[:, 1:]
    ranks[:, 1:] = np.arange(1, width)
    ties = np.flatnonzero((top[:, 1:] == top[:, :-1]).any(axis=1))
    if ties.size:
        ends = np.full((ties.size, width - 1), width - 1, np.int32)
        last = top[ties, 1:] != top[ties, :-1]
        ends[:, :-1] = np.where(last, np.arange(1, width - 1), width - 1)
        ranks[ties, 1:] = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
    alike: Ids = np.where(top == numbers[:, :1], own[:, None], ranks[:, 1:])
    ranks[:, 1:] = alike
    return ranks


def _rank_table() -> Bytes:
    lines = [(b',"rank":%d}' % rank).ljust(_RANK) for rank in range(_SMALL_RANKS)]
    return np.frombuffer(b"".join(lines), np.uint8).reshape(_SMALL_RANKS, _RANK)


_RANKS: Final = _rank_table()


def _rank_places(ranks: Ids) -> Bytes:
    """Ranks [n] as the ends of entries, uint8 [n, bytes]."""
    most = int(ranks.max(initial=0))
    width = _RANK if most < 10**7 else _LONG_RANK
    found = np.empty((ranks.size, width), np.uint8)
    found[:, :_RANK] = _RANKS.take(ranks, axis=0, mode="clip")
    found[:, _RANK:] = _SPACE
    large = np.flatnonzero(ranks >= _SMALL_RANKS)
    if large.size:
        lines = [(b',"rank":%d}' % rank).ljust(width) for rank in ranks[large].tolist()]
        found[large] = np.frombuffer(b"".join(lines), np.uint8).reshape(-1, width)
    return found


# --- completions -------------------------------------------------------------------------------


def completion_logprobs(
    words: Words,
    token_ids: Ids,
    logprobs: Logprobs,
    top: TopLogprobs | None = None,
    as_ids: bool = False,
    offsets: Sequence[int] = (),
) -> bytes:
    """The ``logprobs`` of a completion: of `token_ids` [T] with `logprobs` [T], nan where there is
    none (null), such as an echoed prompt's first token, and the likeliest, [T, k].

    In ``top_logprobs`` a token's own number is among the likeliest, and of tokens with one text the
    largest counts. `offsets` is its ``text_offset``. `as_ids` has ``token_id:N`` for texts.
    """
    texts = texts_of(words, as_ids)
    tokens = [texts.text(token) for token in token_ids.tolist()]
    numbers: list[bytes] = []
    objects: list[bytes] = []
    scored = ScoredTokens(token_ids, logprobs, top)
    for start, stop, known in _runs(~np.isnan(logprobs)):
        if not known:
            numbers += [b"null"] * (stop - start)
            objects += [b"null"] * (stop - start)
            continue
        run = scored.part(slice(start, stop))
        for positions in run.parts():
            own, likeliest = _likeliest(texts, run.part(positions))
            numbers.append(own)
            objects.append(likeliest)
    return b"".join(
        [
            b'{"text_offset":',
            orjson.dumps(list(offsets)),
            b',"token_logprobs":[',
            b",".join(numbers),
            b'],"tokens":[',
            b",".join(map(_quoted, tokens)),
            b'],"top_logprobs":[',
            b",".join(objects),
            b"]}",
        ]
    )


def chat_content(
    words: Words,
    token_ids: Sequence[int] | Ids,
    logprobs: Logprobs,
    top: TopLogprobs | None = None,
    as_ids: bool = False,
) -> bytes:
    """The ``content`` of a chat's ``logprobs``: an object for each of `token_ids` [T] with
    `logprobs` [T], and in its ``top_logprobs`` the likeliest, [T, k].

    Where the token is one of the likeliest it has the number that it has there.
    """
    ids = np.asarray(token_ids, np.int32)
    if not ids.size:
        return b"[]"
    lines_of = texts_of(words, as_ids).tokens
    scored = ScoredTokens(ids, logprobs, top)
    found = [_chat_entries(lines_of, scored.part(each)).data for each in scored.parts()]
    # What ends the position before there is not before the first.
    return b"".join([b"[", b"".join(found)[3:], b"]}]"])


def _chat_entries(lines_of: _Lines, part: ScoredTokens) -> Bytes:
    """Those of some positions; each begins with ``]},``, which ends the one before."""
    ids, numbers, _ = part.entries()
    positions, width = ids.shape
    behind = _NUMBER + _TAIL
    lines, counts = lines_of.of(ids.reshape(-1), behind)
    text = lines.shape[1] - behind
    lines[:, text : text + _NUMBER] = number_places(numbers.reshape(-1), IMPOSSIBLE)
    lines[:, text + _NUMBER :] = _END_OF_LIKELY
    of_position = lines.reshape(positions, width, -1)
    of_position[:, 0, text + _NUMBER :] = _BEGIN_OF_LIKELY
    of_position[:, 0, :3] = np.frombuffer(b"]},", np.uint8)
    if width > 1:
        of_position[:, 1, :3] = _SPACE
        counts.reshape(positions, width, -1)[:, 1:, 1 - _TAIL // _WORD :] = False
    chosen: Bytes = lines.view(np.uint64)[counts].view(np.uint8)
    return chosen


def _runs(known: Mask) -> Iterator[tuple[int, int, bool]]:
    """Where the same goes on: start, stop, and what it is."""
    if not known.size:
        return
    changes = np.flatnonzero(known[1:] != known[:-1]) + 1
    ends = [0, *changes.tolist(), known.size]
    for start, stop in pairwise(ends):
        yield start, stop, bool(known[start])


def _likeliest(texts: TokenTexts, part: ScoredTokens) -> tuple[bytes, bytes]:
    """The numbers of the tokens themselves, and the objects of ``top_logprobs``."""
    ids, numbers, count = part.entries()
    own = numbers_json(np.ascontiguousarray(numbers[:, 0]), IMPOSSIBLE)
    numbers, count = _largest(texts.alike.take(ids), numbers, count)
    data = _written(texts.keys, ids, numbers, count, least=IMPOSSIBLE)
    return own, b"".join([data[2:].data, b"}"])


def _largest(alike: Ids, numbers: Logprobs, count: Mask) -> tuple[Logprobs, Mask]:
    """Numbers and which of them count, [T, width], where of each position the first of those that
    are `alike` has the largest number of them, and the others do not count."""
    told_apart = np.where(count, alike, -1 - np.arange(alike.shape[1]))
    in_order = np.sort(told_apart, axis=1)
    rows = np.flatnonzero((in_order[:, 1:] == in_order[:, :-1]).any(axis=1))
    if not rows.size:
        return numbers, count
    numbers, count = numbers.copy(), count.copy()
    for row in rows.tolist():
        first: dict[int, int] = {}
        for place, text in enumerate(told_apart[row].tolist()):
            known = first.setdefault(text, place)
            if known != place:
                numbers[row, known] = max(numbers[row, known], numbers[row, place])
                count[row, place] = False
    return numbers, count

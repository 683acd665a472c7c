"""An engine without a model: rows that look random, are known in advance and cost nothing.

`mock_row` knows the right row of any prompt, so that a test can tell a row from another
prompt's, and a benchmark measures the pool instead of a model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lmpool.backends.batch import BatchEngine
from lmpool.backends.engine import EngineInfo, Measures, Outcome, Request, Tokens
from lmpool.backends.mock.kept import KeptBlocks
from lmpool.errors import EngineBroken, SettingsError
from lmpool.wants import Top, TopLogprobs

_TABLE_ENTRIES: Final = 1 << 20
_TABLE_KEY: Final = 0x6C6D706F6F6C  # "lmpool"
_LARGEST_VOCABULARY: Final = 1 << 24
_LARGEST_TOKENIZER: Final = 1 << 20
_MOST_KEPT: Final = 1 << 24
_FEW: Final = 8
"""Prompts for which numpy takes longer than Python."""


def mock_row(
    tokens: Tokens | Sequence[int], vocab_size: int, adapter: str | None = None
) -> npt.NDArray[np.float32]:
    """The row that `MockEngine` gives for a prompt: float32 [vocab_size], read-only.

    Normalized log-probabilities, the same on every machine and in every run. There are about
    2**20 different rows of a vocabulary size, so two prompts share theirs once in a million.
    """
    prompt = np.asarray(tokens, dtype="<u4").tobytes()
    rows, turns = _places(vocab_size, [prompt], [adapter])
    return _turned(vocab_size, rows[0], turns[0])


@functools.cache
def _table(vocab_size: int) -> npt.NDArray[np.float32]:
    """float32 [rows * 2 * vocab_size]: normalized rows, each written twice in succession.

    Any window of `vocab_size` entries is a rotation of a normalized row, hence normalized too:
    few base rows give many rows, none of which has to be computed.
    """
    count = max(1, _TABLE_ENTRIES // vocab_size)
    words = np.random.Philox(key=_TABLE_KEY).random_raw(count * vocab_size)
    # 20 bits, 8 nats: exact in float32, so that only the normalizer is rounded.
    logits = (words >> np.uint64(44)).reshape(count, vocab_size) * -(2.0**-17)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    table = np.tile(logits.astype(np.float32), 2).ravel()
    table.flags.writeable = False
    return table


@functools.lru_cache(maxsize=8)
def _adapter_key(adapter: str | None) -> bytes:
    if adapter is None:
        return b""
    return hashlib.blake2b(adapter.encode(), digest_size=16).digest()


def _turned(vocab_size: int, row: int, turn: int) -> npt.NDArray[np.float32]:
    """A normalized row, turned by so many entries."""
    start = row * 2 * vocab_size + turn
    return _table(vocab_size)[start : start + vocab_size]


def _places(
    vocab_size: int, prompts: Sequence[bytes], adapters: Sequence[str | None]
) -> tuple[list[int], list[int]]:
    """Which of the normalized rows each prompt has, and by how many entries it is turned."""
    hashes = [
        hashlib.blake2b(prompt, digest_size=8, key=_adapter_key(adapter)).digest()
        if adapter is not None
        else hashlib.blake2b(prompt, digest_size=8).digest()
        for prompt, adapter in zip(prompts, adapters, strict=True)
    ]
    entries = _table(vocab_size).size >> 1
    if len(hashes) <= _FEW:
        places = [divmod(int.from_bytes(h, "little") % entries, vocab_size) for h in hashes]
        return [row for row, _ in places], [turn for _, turn in places]
    places_of_all = np.frombuffer(b"".join(hashes), "<u8") % np.uint64(entries)
    rows, turns = np.divmod(places_of_all, np.uint64(vocab_size))
    return rows.tolist(), turns.tolist()


@functools.cache
def _sorted_row(vocab_size: int, row: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """A normalized row's ids, likeliest first, and the log of the mass from each of them on."""
    values = _table(vocab_size)[row * 2 * vocab_size :][:vocab_size]
    order = np.argsort(-values, kind="stable")
    with np.errstate(divide="ignore"):
        masses = np.log(np.cumsum(np.exp(values[order[::-1]], dtype=np.float64))[::-1])
    return order, np.append(masses, -np.inf)


class _Likeliest(NamedTuple):
    """The likeliest tokens of a normalized row, and all that are as likely as the last of them."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    rest: np.float32
    ties: bool


@functools.lru_cache(maxsize=64)
def _likeliest(vocab_size: int, row: int, k: int) -> _Likeliest:
    order, masses = _sorted_row(vocab_size, row)
    values = _table(vocab_size)[row * 2 * vocab_size :][:vocab_size]
    least, most = values[order[k - 1]], k
    while most < vocab_size and values[order[most]] == least:
        most += 1
    logprobs = values[order[:most]]
    ties = bool((logprobs[1:] == logprobs[:-1]).any())
    return _Likeliest(order[:most].astype(np.int32), logprobs, np.float32(masses[k]), ties)


def _tops(k: int, vocab_size: int, places: Sequence[tuple[int, int]]) -> list[TopLogprobs]:
    """The likeliest tokens of rows at these places, which are those of the rows that they turn."""
    found = [_likeliest(vocab_size, row, k) for row, _ in places]
    turns = np.array([turn for _, turn in places], np.int32)
    turned = (np.stack([likeliest.ids[:k] for likeliest in found]) - turns[:, None]) % vocab_size
    answers = []
    for ids, turn, likeliest in zip(turned, turns, found, strict=True):
        logprobs = likeliest.logprobs
        if likeliest.ties:  # to turn a row changes the ids, which decide among equally likely ones
            ids = (likeliest.ids - turn) % vocab_size
            first = np.lexsort((ids, -logprobs))[:k]
            ids, logprobs = ids[first], logprobs[first]
        answers.append(TopLogprobs(ids, logprobs, likeliest.rest))
    return answers


class MockEngine(BatchEngine):
    """Returns `mock_row`, as slowly and as badly as it is told to.

    `delay` is seconds a batch takes, `delay_per_token` seconds more for each token that it
    computes: all of them, unless it `keeps` the states of so many, in blocks of 16, which are
    nothing but counted. A prompt that contains `fail_token` makes its batch fail; one that contains
    `break_token` breaks the engine. `log` names a file that gets one JSON line a batch: `size`
    (prompts), `tokens` (their total), `start` and `end` (seconds of the monotonic clock), `time`
    (Unix time of the start) and `pid`. `dtype` changes nothing. The last id is the end-of-sequence
    token, id 0 begins one.
    """

    def __init__(
        self,
        model: str = "mock",
        *,
        revision: str | None = None,
        dtype: str = "auto",
        vocab_size: int = 256,
        max_prompt_tokens: int = 4096,
        delay: float = 0.0,
        delay_per_token: float = 0.0,
        keeps: int = 0,
        fail_token: int | None = None,
        break_token: int | None = None,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        _check_count("vocab_size", vocab_size, 2, _LARGEST_VOCABULARY)
        _check_count("max_prompt_tokens", max_prompt_tokens, 1, 1 << 30)
        _check_seconds("delay", delay)
        _check_seconds("delay_per_token", delay_per_token)
        _check_count("keeps", keeps, 0, _MOST_KEPT)
        for name, token in (("fail_token", fail_token), ("break_token", break_token)):
            if token is not None:
                _check_count(name, token, 0, vocab_size - 1)
        self._delay = delay
        self._delay_per_token = delay_per_token
        self._fail_token = fail_token
        self._break_token = break_token
        self._log = None if log is None else _log_path(log)
        self._closed = False
        self._computed_tokens = 0
        self._kept = KeptBlocks(keeps) if keeps else None
        self.info = EngineInfo(
            engine="mock",
            model=model,
            revision=revision,
            vocab_size=vocab_size,
            max_prompt_tokens=max_prompt_tokens,
            dtype="float32",
            encoding="f32",
            identity={"engine": "mock", "revision": revision, "vocab_size": vocab_size},
            bos_token_id=0,
            eos_token_ids=(vocab_size - 1,),
            execution="hashes of prompts",
        )

    def measures(self) -> Measures:
        """The tokens that it was given, but for those that it pretends to have kept."""
        kept = self._kept
        if kept is None:
            return Measures(computed_tokens=self._computed_tokens)
        return Measures(self._computed_tokens, kept.tokens, kept.room, kept.evicted_tokens)

    def clear_cache(self) -> None:
        """Keep nothing of what was kept."""
        if self._kept is not None:
            self._kept.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineBroken("the engine was closed")

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        self._check_open()
        started, clock = time.monotonic(), time.time()
        tokens = sum([request.tokens.size for request in requests])
        computed = tokens if self._kept is None else self._keep(self._kept, requests)
        self._computed_tokens += computed
        seconds = self._delay + self._delay_per_token * computed
        if seconds > 0.0:
            time.sleep(seconds)
        try:
            self._misbehave(requests)
        finally:
            if self._log is not None:
                _append(self._log, len(requests), tokens, started, clock)
        vocab_size = self.info.vocab_size
        rows, turns = _places(
            vocab_size, [r.tokens.tobytes() for r in requests], [r.adapter for r in requests]
        )
        outcomes: list[Outcome] = []
        tops: dict[int, dict[int, tuple[int, int]]] = {}
        for number, (r, row, turn) in enumerate(zip(requests, rows, turns, strict=True)):
            if type(r.want) is Top:
                tops.setdefault(r.want.k, {})[number] = row, turn
                outcomes.append(Outcome(r.id))
            else:
                outcomes.append(Outcome(r.id, _turned(vocab_size, row, turn)))
        for k, places in tops.items():
            answers = _tops(k, vocab_size, list(places.values()))
            for number, answer in zip(places, answers, strict=True):
                outcomes[number] = Outcome(requests[number].id, answer=answer)
        return outcomes

    @staticmethod
    def _keep(kept: KeptBlocks, requests: Sequence[Request]) -> int:
        return sum(kept.compute(r.tokens.tobytes(), _adapter_key(r.adapter)) for r in requests)

    def _misbehave(self, requests: Sequence[Request]) -> None:
        if self._break_token is not None and _contains(requests, self._break_token):
            raise EngineBroken(f"a prompt contains the token {self._break_token}")
        if self._fail_token is not None and _contains(requests, self._fail_token):
            raise RuntimeError(f"a prompt contains the token {self._fail_token}")

    def add_adapter(self, name: str, path: str) -> None:
        """Take requests for the adapter `name`; its folder is not looked at."""
        self.adapters[name] = path

    def remove_adapter(self, name: str) -> None:
        self.refuse_adapter(name)
        self.adapters.pop(name, None)

    def close(self) -> None:
        """Refuse what comes from now on."""
        self._closed = True

    def byte_vocabulary(self) -> list[bytes]:
        """Ids below 256 are that byte; each further one is ``<id>``."""
        size = self.info.vocab_size
        return [bytes([i]) if i < 256 else f"<{i}>".encode() for i in range(size)]

    def tokenizer_files(self) -> dict[str, bytes]:
        """A tokenizer that makes each byte of a text a token; none of a huge vocabulary."""
        size = self.info.vocab_size
        return _tokenizer_files(size) if size <= _LARGEST_TOKENIZER else {}


def _tokenizer_files(vocab_size: int) -> dict[str, bytes]:
    """A byte-level tokenizer of transformers for the vocabulary of `MockEngine`."""
    # GPT-2's alphabet: printable bytes are themselves, the others follow from 256 on.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = {byte: 256 + n for n, byte in enumerate(b for b in range(256) if b not in shown)}
    tokens = [chr(hidden.get(i, i)) if i < 256 else f"<{i}>" for i in range(vocab_size)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    level["trim_offsets"] = True
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": ids, "merges": []},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def _contains(requests: Sequence[Request], token: int) -> bool:
    return any(bool((request.tokens == token).any()) for request in requests)


def _append(path: Path, size: int, tokens: int, started: float, clock: float) -> None:
    line = json.dumps(
        {
            "size": size,
            "tokens": tokens,
            "start": started,
            "end": time.monotonic(),
            "time": clock,
            "pid": os.getpid(),
        }
    )
    # One write to a file opened for appending: lines of several workers never mix.
    with path.open("ab", buffering=0) as log:
        log.write(line.encode() + b"\n")


def _check_count(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise SettingsError(f"{name}={value!r}: an integer from {low} to {high} expected")


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 3600.0:
        raise SettingsError(f"{name}={value!r}: seconds from 0 to 3600 expected")


def _log_path(log: str | os.PathLike[str]) -> Path:
    path = Path(log)
    if not path.parent.is_dir():
        raise SettingsError(f"log={str(path)!r}: create the folder {str(path.parent)!r} first")
    return path

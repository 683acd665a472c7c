"""Scenarios that a right engine goes through, written by hand: each shows one promise.

They know the right answers from `mock_row` alone, and from drawing token after token from it.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Final

import numpy as np

from lmpool.backends import Engine, Outcome, Request
from lmpool.backends.mock import mock_row
from lmpool.backends.sampling import sample_token
from lmpool.errors import EngineError
from lmpool.wants import Generate, Generation, OfRow, Row, Top, Want
from tests.engines.mutants.registry import Make, Witness

VOCAB: Final = 300
LONGEST: Final = 200
OPTIONS: Final[Mapping[str, Any]] = {"vocab_size": VOCAB, "max_prompt_tokens": LONGEST}
ROW: Final = Row()
_MOST_STEPS: Final = 20_000

Prompt = Sequence[int]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Some prompt of that length."""
    return np.random.default_rng([seed, length]).integers(0, VOCAB - 1, length).tolist()


def prompts_of(count: int, length: int = 5, seed: int = 0) -> list[list[int]]:
    """So many different prompts of one length."""
    drawn = np.random.default_rng([seed, length, count]).integers(0, VOCAB - 1, (count, length))
    drawn[:, 0] = np.arange(count) % (VOCAB - 1)
    return drawn.tolist()


def request(
    id: int | bytes, prompt: Prompt, adapter: str | None = None, want: Want = ROW
) -> Request:
    """A request; a number is made an id of 16 bytes, as a worker's are."""
    name = id if isinstance(id, bytes) else (id % (1 << 120) + 7).to_bytes(16, "big")
    return Request(name, np.array(prompt, np.uint32), adapter, want)


def run(engine: Engine, pending: Iterable[bytes]) -> dict[bytes, Outcome]:
    """Step until nothing is in flight; each of `pending` has exactly one outcome."""
    waiting = set(pending)
    found: dict[bytes, Outcome] = {}
    for _ in range(_MOST_STEPS):
        if not engine.in_flight():
            break
        for outcome in engine.step():
            assert outcome.id in waiting, f"an outcome that nobody waits for: {outcome.id!r}"
            waiting.remove(outcome.id)
            found[outcome.id] = outcome
        assert engine.in_flight() == len(waiting), (engine.in_flight(), len(waiting))
    assert not waiting, f"no outcome for {len(waiting)}"
    assert engine.in_flight() == 0
    return found


def ask(engine: Engine, requests: Sequence[Request]) -> list[Outcome]:
    """The outcomes of requests that are submitted at once, in their order."""
    engine.submit(requests)
    found = run(engine, [r.id for r in requests])
    return [found[r.id] for r in requests]


def check(request: Request, outcome: Outcome, vocab: int = VOCAB) -> None:
    """The outcome is the right one, in the right form."""
    assert outcome.error is None, outcome.error
    assert (outcome.row is None) != (outcome.answer is None)
    if isinstance(request.want, Generate):
        assert isinstance(outcome.answer, Generation)
        ids = outcome.answer.token_ids
        assert isinstance(ids, np.ndarray)
        assert (ids.dtype, ids.ndim) == (np.int32, 1)
        expected = drawn(request, vocab)
        assert ids.tolist() == expected, (ids.tolist(), expected)
        check_said(request, outcome.answer, vocab)
        return
    if isinstance(request.want, OfRow):
        right = request.want.of_row(mock_row(request.tokens, vocab, request.adapter))
        check_parts(outcome.answer, right)
        return
    row = outcome.row
    assert isinstance(row, np.ndarray)
    assert (row.dtype, row.shape) == (np.dtype("=f4"), (vocab,))
    assert row.flags.c_contiguous
    assert np.array_equal(row, mock_row(request.tokens, vocab, request.adapter))


def check_said(request: Request, answer: Generation, vocab: int) -> None:
    """It says rightly why it ended, and what was asked for of each token."""
    want, tokens = request.want, answer.token_ids.tolist()
    assert isinstance(want, Generate)
    ends = [stop for stop in want.stop_sequences if tuple(tokens[-len(stop) :]) == stop]
    room = LONGEST + 1 - request.tokens.size
    reason, ending = ("length" if want.max_tokens <= room else "context"), 0
    if tokens and tokens[-1] in eos_of(want, vocab):
        reason, ending = "eos", 1
    elif ends:
        reason, ending = "stop", max(map(len, ends))
    assert (answer.finish_reason, answer.ending) == (reason, ending)
    assert (answer.logprobs is not None) == want.logprobs
    assert (answer.top_logprobs is not None) == bool(want.top_logprobs)
    before = [[*request.tokens, *tokens[:n]] for n in range(len(tokens))]
    rows = [mock_row(prompt, vocab, request.adapter) for prompt in before]
    if answer.logprobs is not None:
        right = np.array([row[token] for row, token in zip(rows, tokens, strict=True)], np.float32)
        check_parts(answer.logprobs, right)
    if answer.top_logprobs is not None:
        tops = [Top(want.top_logprobs).of_row(row) for row in rows]
        for found, parts in zip(
            parts_of(answer.top_logprobs), zip(*map(parts_of, tops), strict=True), strict=True
        ):
            check_parts(found, np.array(parts))


def eos_of(want: Generate, vocab: int) -> Sequence[int]:
    """The tokens that end it, each as one."""
    return (vocab - 1,) if want.eos_token_ids is None else want.eos_token_ids


def check_parts(found: Any, right: Any) -> None:
    """The answers have the same forms and ids; numbers may be off by rounding."""
    assert type(found) is type(right)
    for one, other in zip(parts_of(found), parts_of(right), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.allclose(one, other, rtol=0, atol=1e-5 if one.dtype.kind == "f" else 0)


def parts_of(answer: Any) -> list[Any]:
    """The arrays of an answer."""
    if isinstance(answer, np.ndarray):
        return [answer]
    return [getattr(answer, field.name) for field in fields(answer)]


def drawn(request: Request, vocab: int = VOCAB, longest: int = LONGEST) -> list[int]:
    """The right continuation, a token at a time."""
    want = request.want
    assert isinstance(want, Generate)
    assert want.seed is not None
    left = {"top_p": want.top_p, "top_k": want.top_k, "min_p": want.min_p}
    tokens: list[int] = request.tokens.tolist()
    found: list[int] = []
    while len(found) < want.max_tokens and len(tokens) <= longest:
        row = mock_row(tokens, vocab, request.adapter)
        token = sample_token(row, want.temperature, want.seed, len(found), **left)
        found.append(token)
        tokens.append(token)
        stops = any(tuple(found[-len(stop) :]) == stop for stop in want.stop_sequences)
        if stops or token in eos_of(want, vocab):
            break
    return found


def ask_rightly(engine: Engine, requests: Sequence[Request]) -> None:
    """Submit at once, and check every outcome."""
    for each, outcome in zip(requests, ask(engine, requests), strict=True):
        check(each, outcome)


def requests_of(
    prompts: Iterable[Prompt], adapter: str | None = None, want: Want = ROW, start: int = 0
) -> list[Request]:
    return [request(n, prompt, adapter, want) for n, prompt in enumerate(prompts, start)]


# --- witnesses -----------------------------------------------------------------------------------


def scenario(play: Callable[[Engine], None]) -> Witness:
    """One engine goes through it."""

    def witness(make: Make) -> None:
        play(make(**OPTIONS))

    return witness


def rows(
    *batches: Sequence[Prompt], adapters: Sequence[str] = (), adapter: str | None = None
) -> Witness:
    """The rows of each batch, one batch after the other, are right."""

    def play(engine: Engine) -> None:
        for name in adapters:
            engine.add_adapter(name, f"/adapters/{name}")
        for batch in batches:
            ask_rightly(engine, requests_of(batch, adapter))

    return scenario(play)


def life(count: int, at_once: int = 200) -> Witness:
    """The rows of so many prompts over an engine's life are right."""
    return rows(*(prompts_of(at_once, seed=n) for n in range(-(-count // at_once))))


def continuations(
    *wants: Generate, prompts: Sequence[Prompt] = ((1, 2, 3),), adapter: str | None = None
) -> Witness:
    """Continuations of prompts, all at once for each want, are right."""

    def play(engine: Engine) -> None:
        if adapter is not None:
            engine.add_adapter(adapter, f"/adapters/{adapter}")
        for want in wants:
            ask_rightly(engine, requests_of(prompts, adapter, want))

    return scenario(play)


def refused(
    bad: Sequence[Prompt] = (), adapter: str | None = None, wants: Sequence[Want] = (ROW,)
) -> Witness:
    """Of what cannot be run each is refused alone; its company is answered."""

    def play(engine: Engine) -> None:
        wrong = [
            request(n, p, adapter, w) for n, (p, w) in enumerate((p, w) for p in bad for w in wants)
        ]
        good = requests_of(prompts_of(3), start=1000)
        outcomes = ask(engine, [good[0], *wrong, *good[1:]])
        for each, outcome in zip([good[0], *good[1:]], [outcomes[0], *outcomes[-2:]], strict=True):
            check(each, outcome)
        for outcome in outcomes[1:-2]:
            assert isinstance(outcome.error, EngineError), outcome
            assert outcome.row is None
            assert outcome.answer is None

    return scenario(play)


def reduced(
    *wants: Want, prompts: Sequence[Prompt] = ((1, 2, 3), (4, 5)), adapter: str | None = None
) -> Witness:
    """What rows answer is right: all wants of all prompts at once, and then again."""

    def play(engine: Engine) -> None:
        if adapter is not None:
            engine.add_adapter(adapter, f"/adapters/{adapter}")
        asked = [(prompt, want) for prompt in prompts for want in wants]
        asked += [(prompt, ROW) for prompt in prompts]
        for _ in range(2):
            ask_rightly(engine, [request(n, p, adapter, w) for n, (p, w) in enumerate(asked)])

    return scenario(play)


def bounded(
    play: Callable[[Engine, int], None], before: int = 60, rounds: int = 80, most: int = 45
) -> Witness:
    """After `before` rounds of it, further ones take less than `most` bytes each.

    What Python allocates once is not what each round keeps: it is spread over more of them.
    """

    def witness(make: Make) -> None:
        engine = make(**OPTIONS)
        for number in range(before):
            play(engine, number)
        done = before
        for more in (rounds, 3 * rounds):
            grown = _traced(partial(play, engine), range(done, done + more))
            if grown < most * more:
                return
            done += more
        raise AssertionError(f"{grown / more:.0f} bytes a round are kept")

    return witness


def _traced(play: Callable[[int], None], numbers: range) -> int:
    """The bytes that are kept of so many rounds."""
    gc.collect()
    tracemalloc.start()
    try:
        for number in numbers:
            play(number)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

"""What is right for each want: how one is made up, and how its answer is judged.

A new want joins the contract by its reference among `References`, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np

from lmpool.backends.contract.breaches import expect
from lmpool.backends.contract.continuations import ContinuationJudge
from lmpool.backends.contract.drawn import DrawReference
from lmpool.backends.contract.generating import draw_generate, refuses, streamed
from lmpool.backends.contract.hidden import HeadReference, HiddenReference
from lmpool.backends.contract.operations import Prompt
from lmpool.backends.contract.prompts import Random
from lmpool.backends.contract.reduced import TokensReference, TopReference
from lmpool.backends.contract.scores import ScoreReference
from lmpool.backends.contract.subject import Adapter
from lmpool.backends.contract.truth import Truth
from lmpool.backends.contract.want_reference import Answered, WantReference
from lmpool.backends.engine import EngineInfo
from lmpool.model_info import Encoding
from lmpool.wants import (
    Draw,
    Generate,
    HeadPart,
    Hidden,
    Row,
    Score,
    Stream,
    Tokens,
    Top,
    Want,
)


class RowReference(WantReference[Row]):
    """Rows: each its own prompt's, in the form that `EngineInfo` promises."""

    def draw(self, random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth) -> Row:
        # How it travels is the worker's to do, and changes nothing for an engine.
        encodings: tuple[Encoding | None, ...] = (None, None, None, "f32", "bf16", "f16")
        return Row(encodings[int(random.integers(len(encodings)))])

    def judge(self, answered: Sequence[Answered], truth: Truth) -> None:
        by_adapter: dict[Adapter | None, list[Answered]] = {}
        for each in answered:
            self._check_form(each, truth)
            by_adapter.setdefault(each.adapter, []).append(each)
        for adapter, alike in by_adapter.items():
            most = max(1, (32 << 20) // truth.info.vocab_size // 4)
            for start in range(0, len(alike), most):
                part = alike[start : start + most]
                rows = [each.outcome.logprobs() for each in part]
                truth.compare([each.asked for each in part], rows, adapter)

    def _check_form(self, each: Answered, truth: Truth) -> None:
        row = each.outcome.row
        expect(row is not None, "a row was asked for", "another answer came:", each.asked)
        assert row is not None
        allowed = ["float32", "uint16"] if truth.info.encoding == "bf16" else ["float32"]
        dtype = str(getattr(row, "dtype", None))  # that of another byte order has another name
        expect(
            type(row) is np.ndarray and dtype in allowed,
            f"rows are {' or '.join(allowed)}, as info.encoding={truth.info.encoding!r} says",
            type(row),
            f"of {dtype}:",
            each.asked,
        )
        truth.narrow += dtype == "uint16"
        expect(
            row.shape == (truth.info.vocab_size,) and row.flags.c_contiguous,
            "rows are contiguous, one number a token of the vocabulary",
            (row.shape, row.strides),
            each.asked,
        )


class GenerateReference(WantReference[Generate]):
    """Continuations: drawn from the model's rows, by seed, up to their end."""

    def __init__(self) -> None:
        self._judge = ContinuationJudge()

    def draw(
        self, random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth
    ) -> Generate:
        return draw_generate(random, prompt, adapter, truth)

    def judge(self, answered: Sequence[Answered], truth: Truth) -> None:
        self._judge.judge(
            [(each.asked, each.adapter, each.outcome.answer) for each in answered], truth
        )

    def refuses(self, want: Generate, info: EngineInfo) -> bool:
        return refuses(want, info.vocab_size)


class StreamReference(WantReference[Stream]):
    """Continuations that are told as they are drawn: `Told` judges what is told."""

    def __init__(self, generate: GenerateReference) -> None:
        self._generate = generate

    def draw(self, random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth) -> Stream:
        return streamed(self._generate.draw(random, prompt, adapter, truth))

    def judge(self, answered: Sequence[Answered], truth: Truth) -> None:
        self._generate.judge(answered, truth)

    def refuses(self, want: Stream, info: EngineInfo) -> bool:
        return self._generate.refuses(want, info)


class References:
    """The reference of each want; what they learn of an engine's draws is that engine's."""

    def __init__(self) -> None:
        self._row = RowReference()
        self._generate = GenerateReference()
        self._stream = StreamReference(self._generate)
        self._top = TopReference()
        self._tokens = TokensReference()
        self._draw = DrawReference()
        self._score = ScoreReference()
        self._hidden = HiddenReference()
        self._head = HeadReference()

    def of(self, want: Want) -> WantReference[Any]:
        """The reference of a want of this kind."""
        match want:
            case Row():
                return self._row
            case Stream():
                return self._stream
            case Generate():
                return self._generate
            case Top():
                return self._top
            case Tokens():
                return self._tokens
            case Draw():
                return self._draw
            case Score():
                return self._score
            case Hidden():
                return self._hidden
            case HeadPart():
                return self._head
            case _:
                assert_never(want)

    def others(self) -> Sequence[WantReference[Any]]:
        """Those of wants that take more than a row."""
        return (self._generate, self._stream, self._score)

    def of_states(self) -> Sequence[WantReference[Any]]:
        """Those of what is not a row, nor follows from one: of states, and of the head."""
        return (self._hidden, self._head)

    def of_rows(self) -> Sequence[WantReference[Any]]:
        """Those of wants that a row answers, which is not asked for itself."""
        return (self._top, self._tokens, self._draw)

    def judge(self, answered: Sequence[Answered], truth: Truth) -> None:
        """Raise `BrokenPromise` where one of these answers is not right."""
        by_kind: dict[type[Want], list[Answered]] = {}
        for each in answered:
            by_kind.setdefault(type(each.asked.want), []).append(each)
        for alike in by_kind.values():
            self.of(alike[0].asked.want).judge(alike, truth)

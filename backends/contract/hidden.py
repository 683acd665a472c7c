"""What is right of hidden states, and of the head that makes rows of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np

from lmpool.backends.contract.breaches import expect
from lmpool.backends.contract.operations import Asked, Prompt
from lmpool.backends.contract.prompts import Random
from lmpool.backends.contract.subject import Adapter
from lmpool.backends.contract.truth import Truth
from lmpool.backends.contract.want_reference import Answered, WantReference
from lmpool.backends.engine import EngineInfo
from lmpool.head_form import HeadForm
from lmpool.wants import HeadBytes, HeadPart, Hidden

ROWS_OF_STATES: Final = "the head makes the row of a prompt of its hidden state"
_STATE: Final = "a hidden state is float32, as many numbers as info.head says"
_PART: Final = "a part of the head is as it was, or its digest"
_BAD: Final = 0.1
"""The share of wants that an engine must refuse."""
_TOGETHER: Final = 64


class HiddenReference(WantReference[Hidden]):
    """Judges each state by the row that the engine's own head makes of it."""

    def draw(self, random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth) -> Hidden:
        return Hidden()

    def refuses(self, want: Hidden, info: EngineInfo) -> bool:
        return info.head is None

    def judge(self, answered: Sequence[Answered], truth: Truth) -> None:
        head = truth.head
        assert head is not None
        by_adapter: dict[Adapter | None, list[Answered]] = {}
        for each in answered:
            _check_form(each, head.form)
            by_adapter.setdefault(each.adapter, []).append(each)
        for adapter, alike in by_adapter.items():
            for start in range(0, len(alike), _TOGETHER):
                part = alike[start : start + _TOGETHER]
                states = np.stack([np.asarray(each.outcome.answer) for each in part])
                rows = truth.rows([each.asked.prompt for each in part], adapter)
                errors = np.abs(head.logprobs(states) - rows).max(axis=1)
                worst = int(errors.argmax())
                expect(
                    bool(errors[worst] <= truth.tolerance),
                    ROWS_OF_STATES,
                    f"off by {errors[worst]:.3g} nats:",
                    part[worst].asked,
                )


def _check_form(each: Answered, form: HeadForm) -> None:
    state = each.outcome.answer
    expect(
        isinstance(state, np.ndarray)
        and state.dtype == np.float32
        and state.shape == (form.hidden_size,),
        _STATE,
        f"{getattr(state, 'dtype', type(state))} {getattr(state, 'shape', '')}:",
        each.asked,
    )


class HeadReference(WantReference[HeadPart]):
    """Judges parts of the head by those that were read at first."""

    def draw(
        self, random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth
    ) -> HeadPart:
        form = truth.info.head
        parts = 1 if form is None else form.parts(truth.info.vocab_size)
        beyond = random.random() < _BAD
        number = parts + int(random.choice((0, 1, 2**16))) if beyond else random.integers(parts)
        return HeadPart(int(number), bool(random.random() < 0.5))

    def refuses(self, want: HeadPart, info: EngineInfo) -> bool:
        return info.head is None or want.number >= info.head.parts(info.vocab_size)

    def judge(self, answered: Sequence[Answered], truth: Truth) -> None:
        assert truth.head is not None
        for each in answered:
            want, answer = each.asked.want, each.outcome.answer
            assert isinstance(want, HeadPart)
            right = truth.head.parts[want.number]
            if want.hashed:
                right = hashlib.blake2b(right, digest_size=16).digest()
            _same(each.asked, answer, right)


def _same(asked: Asked, answer: object, right: bytes) -> None:
    expect(
        isinstance(answer, HeadBytes) and answer.data.tobytes() == right, _PART, "another:", asked
    )

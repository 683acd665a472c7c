"""The bytes of an answer by what is wanted, from lmpool's own encoders."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lmpool.errors import LmpoolError, SettingsError
from lmpool.model_info import Encoding, ModelInfo
from lmpool.plan.model import PlannedModel
from lmpool.result_memory import footprint
from lmpool.wants import (
    Draw,
    Draws,
    Generate,
    Generation,
    Hidden,
    Row,
    Score,
    Tokens,
    Top,
    TopLogprobs,
    Want,
)
from lmpool.wants.tokens import MAX_TOKEN_IDS

MOST_GENERATED: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Given:
    """What an engine might have computed; only its size counts."""

    answer: Any = None
    row: Any = None
    logsumexp: float = 1.0


@dataclass(frozen=True, slots=True)
class PlannedWant:
    """A want, how much of what is asked it is, and what an answer takes."""

    text: str
    want: Want
    share: float
    stored: int
    """Bytes under the result's key."""

    @property
    def footprint(self) -> int:
        """Bytes of the server's memory."""
        return footprint(self.stored)


def planned_wants(
    texts: Sequence[str], model: PlannedModel, encoding: Encoding, prompt_tokens: int
) -> tuple[PlannedWant, ...]:
    """The wants of ``row``, ``top:20=0.8`` and the like. Raises `SettingsError`."""
    named = [_share(text) for text in texts]
    given = [share for _, share in named if share is not None]
    if given and len(given) < len(named):
        raise SettingsError(
            f"want={' '.join(texts)!r}: some have a share and some have none; write one of each, "
            "as in --want top:20=0.8 --want row=0.2, or of none"
        )
    if given and not math.isclose(sum(given), 1.0, abs_tol=1e-6):
        raise SettingsError(
            f"want={' '.join(texts)!r}: the shares are {sum(given):g} together; write shares that "
            "are 1 together"
        )
    found = []
    for name, share in named:
        want, computed = _want(name, model, encoding, prompt_tokens)
        stored = len(want.encode(computed, model.vocab_size))
        found.append(PlannedWant(name, want, share or 1 / len(named), stored))
    return tuple(found)


def _share(text: str) -> tuple[str, float | None]:
    name, equals, share = text.partition("=")
    if not equals:
        return name, None
    try:
        number = float(share)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:
        raise SettingsError(f"want={text!r}: its share {share!r} is no number above 0, up to 1")
    return name, number


def _want(
    text: str, model: PlannedModel, encoding: Encoding, prompt_tokens: int
) -> tuple[Want, _Given]:
    kind, colon, number = text.partition(":")
    if kind not in _KINDS:
        raise SettingsError(
            f"want={text!r}: there is no such want; write one of {', '.join(_KINDS)}, with a "
            "number where it takes one, as in top:20, tokens:8, score:5, draw:8, generate:64"
        )
    make, usual = _KINDS[kind]
    if colon and (usual is None or not number.isdecimal() or len(number) > 9):
        expected = "takes no number" if usual is None else "takes a whole number"
        raise SettingsError(f"want={text!r}: {kind} {expected}, as in {_example(kind)}")
    try:
        return make(int(number) if colon else usual or 0, model, encoding, prompt_tokens)
    except LmpoolError as error:
        raise SettingsError(f"want={text!r}: {error}") from None


def _example(kind: str) -> str:
    usual = _KINDS[kind][1]
    return kind if usual is None else f"{kind}:{usual}"


def _info(model: PlannedModel, encoding: Encoding, prompt_tokens: int) -> ModelInfo:
    return ModelInfo(
        model.name, None, "0" * 32, model.vocab_size, prompt_tokens, model.dtype, "", encoding
    )


_Made = tuple[Want, _Given]


def _row(n: int, model: PlannedModel, encoding: Encoding, tokens: int) -> _Made:
    kind = np.uint16 if encoding == "bf16" else np.float32
    return Row(encoding), _Given(row=np.zeros(model.vocab_size, kind))


def _top(k: int, model: PlannedModel, encoding: Encoding, tokens: int) -> _Made:
    want = Top(k).checked(_info(model, encoding, tokens))
    return want, _Given(TopLogprobs(np.zeros(k, np.int32), _floats(k), np.float32(0)))


def _tokens(n: int, model: PlannedModel, encoding: Encoding, tokens: int) -> _Made:
    want = Tokens([0] * min(n, MAX_TOKEN_IDS + 1)).checked(_info(model, encoding, tokens))
    return want, _Given(_floats(n))


def _score(k: int, model: PlannedModel, encoding: Encoding, tokens: int) -> _Made:
    want = Score(top_logprobs=k).checked(_info(model, encoding, tokens))
    wrong = want.misfit_prompt(tokens)
    if wrong is not None:
        raise SettingsError(wrong)
    return want, _Given(want.blank(tokens - 1))


def _draw(n: int, model: PlannedModel, encoding: Encoding, tokens: int) -> _Made:
    want = Draw(n, seed=0).checked(_info(model, encoding, tokens))
    answer = Draws(np.zeros(n, np.int32), _floats(n), _floats(n), np.float32(0))
    return want, _Given(answer)


def _generate(n: int, model: PlannedModel, encoding: Encoding, tokens: int) -> _Made:
    if n > MOST_GENERATED:
        raise SettingsError(f"write at most generate:{MOST_GENERATED}")
    want = Generate(n, seed=0).checked(_info(model, encoding, tokens))
    return want, _Given(Generation(np.zeros(n, np.int32), 0, "length"))


def _hidden(n: int, model: PlannedModel, encoding: Encoding, tokens: int) -> _Made:
    if model.hidden_size is None:
        raise SettingsError("config.json does not name the hidden size")
    # A number that the model's dtype has, and no shorter one.
    number = {"bfloat16": 1.0, "float16": 1 + 2**-10, "float32": 1 + 2**-20}[model.dtype]
    return Hidden(), _Given(np.full(model.hidden_size, number, np.float32))


def _floats(count: int) -> Any:
    return np.zeros(count, np.float32)


_KINDS: Final[dict[str, tuple[Callable[[int, PlannedModel, Encoding, int], _Made], int | None]]] = {
    "row": (_row, None),
    "top": (_top, 20),
    "tokens": (_tokens, 8),
    "score": (_score, 0),
    "draw": (_draw, 1),
    "generate": (_generate, 64),
    "hidden": (_hidden, None),
}
"""How each is made up, and the number that it has where none is written."""

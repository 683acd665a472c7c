"""What engines score, beside the rows of transformers in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from lmpool.backends import Engine
from lmpool.backends.contract import ask
from lmpool.backends.engine import Request
from tests.support.exact_answers import RowOf, disturb, nested_texts, whole
from tests.support.scores import check_scores, random_score

_TOGETHER: Final = 25


def check_exact_scores(
    engine: Engine, rows: RowOf, adapters: Mapping[str, str], asks: int, seed: int = 1
) -> None:
    """Ask for the scores of `asks` texts, with all that can happen to kept states between.

    Texts are nested, repeated, and begin alike; `adapters` are folders by name.
    """
    random = np.random.default_rng(seed)
    info: Any = engine.info  # has all that a check looks at
    texts = nested_texts(random, info.vocab_size)
    loaded: list[str] = list(engine.adapters)  # type: ignore[attr-defined]
    for start in range(0, asks, _TOGETHER):
        disturb(engine, random, adapters, loaded, texts)
        requests = []
        for number in range(start, min(start + _TOGETHER, asks)):
            text = texts[int(random.integers(len(texts)))]
            size = len(text) if random.random() < 0.5 else int(random.integers(2, len(text) + 1))
            by = [None, *loaded][int(random.integers(1 + len(loaded)))]
            want = random_score(random, size, info.vocab_size).checked(info)
            requests.append(Request(b"%d" % number, np.array(text[:size], np.uint32), by, want))
        for request, outcome in zip(requests, ask(engine, requests), strict=True):
            tokens = tuple(request.tokens.tolist())
            rows(whole(tokens, texts), request.adapter)
            before = [rows(tokens[:n], request.adapter) for n in range(1, len(tokens))]
            check_scores(outcome, request, np.stack(before))

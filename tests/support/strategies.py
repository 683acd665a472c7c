"""What property tests are made of: any wants, any jobs, and anything that msgpack can say."""

from __future__ import annotations

from dataclasses import fields

import msgpack
import numpy as np
from hypothesis import strategies as st

from lmpool.wants import (
    MAX_EOS_IDS,
    Choice,
    Digest,
    Draw,
    Generate,
    HeadPart,
    Hidden,
    PositionIds,
    Row,
    Score,
    Stream,
    Tokens,
    Top,
    Want,
)
from lmpool.wire import Job

VOCABULARY = 1000
"""Tokens of the model that wants are checked for."""

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT32 = st.integers(0, 2**32 - 1)
IDS = st.integers(0, VOCABULARY - 1)

TEMPERATURES = st.floats(0, 100).map(lambda value: value + 0.0)  # 0.0 has one form

ROWS: st.SearchStrategy[Row] = st.builds(Row, st.sampled_from(["f32", "bf16", "f16"]))
GENERATES: st.SearchStrategy[Generate] = st.builds(
    Generate,
    max_tokens=st.integers(0, 10_000),
    eos_token_ids=st.lists(UINT32, max_size=MAX_EOS_IDS).map(tuple),
    temperature=TEMPERATURES,
    seed=INT64,
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1).map(lambda value: value + 0.0),
    stop=st.lists(st.lists(IDS, min_size=1, max_size=5).map(tuple), max_size=4).map(tuple),
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 400),
)
TOPS: st.SearchStrategy[Top] = st.builds(Top, st.integers(1, VOCABULARY))
TOKENS: st.SearchStrategy[Tokens] = st.lists(IDS, min_size=1, max_size=20).map(
    lambda ids: Tokens(token_bytes(*ids))
)


@st.composite
def choices(draw: st.DrawFn) -> Choice | None:
    """Sets of tokens in the one form of each: all, few, all but few, and about half."""
    ids = draw(st.sets(IDS, min_size=1, max_size=30))
    kind = draw(st.sampled_from(["all", "few", "but", "half"]))
    if kind == "half":
        ids |= set(range(min(ids), VOCABULARY, 2))
    match kind:
        case "all":
            return None
        case "but":
            return Choice.of(None, list(ids), VOCABULARY)
        case _:
            return Choice.of(list(ids), None, VOCABULARY)


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    """Draws of which there are tokens enough."""
    choice, replacement = draw(choices()), draw(st.booleans())
    most = VOCABULARY if choice is None else int(choice.members(VOCABULARY).sum())
    n = draw(st.integers(1, 4096 if replacement else most))
    return Draw(n, draw(INT64), draw(TEMPERATURES), replacement, choice)


@st.composite
def scores(draw: st.DrawFn) -> Score:
    """Scores with no ids, with one list for all positions, or one for each."""
    ids = draw(st.none() | st.lists(IDS, min_size=1, max_size=12).map(lambda i: token_bytes(*i)))
    width = draw(st.sampled_from([None, 1, len(ids) // 4])) if ids is not None else None
    asked = ids if ids is None or width is None else PositionIds(width, ids)
    temperature = draw(st.floats(0.01, 100))
    return Score(draw(st.integers(1, 10_000)), draw(st.integers(0, VOCABULARY)), asked, temperature)


STREAMS: st.SearchStrategy[Stream] = GENERATES.map(
    lambda want: Stream(**{field.name: getattr(want, field.name) for field in fields(want)})
)
HIDDEN: st.SearchStrategy[Hidden] = st.just(Hidden())
HEADS: st.SearchStrategy[HeadPart] = st.builds(
    HeadPart, st.integers(0, VOCABULARY - 1), st.booleans()
)

WANTS: st.SearchStrategy[Want] = (
    ROWS | TOPS | TOKENS | draws() | scores() | GENERATES | STREAMS | HIDDEN | HEADS
)
"""Wants as they travel: nothing is left open."""

PROMPTS = st.lists(UINT32, min_size=1, max_size=50).map(lambda ids: token_bytes(*ids))
ADAPTERS = st.none() | st.text(min_size=1, max_size=512)


def token_bytes(*ids: int) -> bytes:
    """Token ids as they travel."""
    return np.array(ids, dtype="<u4").tobytes()


JOBS: st.SearchStrategy[Job] = st.builds(
    Job,
    want=WANTS,
    digest=st.binary(min_size=16, max_size=16).map(Digest),
    tokens=PROMPTS,
    adapter=ADAPTERS,
    deadline=st.none() | st.integers(0, 2**63 - 1),
    sent=INT64,
)

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | INT64
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=20)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
    | st.builds(msgpack.Timestamp, st.integers(0, 2**31)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
"""Whatever a field can hold."""

"""What property tests are made of: any wants, any jobs, and anything that msgpack can say."""

from __future__ import annotations

import msgpack
import numpy as np
from hypothesis import strategies as st

from lmpool.wants import MAX_EOS_IDS, Digest, Generate, Row, Want
from lmpool.wire import Job

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT32 = st.integers(0, 2**32 - 1)

ROWS: st.SearchStrategy[Row] = st.builds(Row, st.sampled_from(["f32", "bf16", "f16"]))
GENERATES: st.SearchStrategy[Generate] = st.builds(
    Generate,
    max_tokens=st.integers(1, 10_000),
    eos_token_ids=st.lists(UINT32, max_size=MAX_EOS_IDS).map(tuple),
    temperature=st.floats(0, 100).map(lambda value: value + 0.0),  # 0.0 has one form
    seed=INT64,
)
WANTS: st.SearchStrategy[Want] = ROWS | GENERATES
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

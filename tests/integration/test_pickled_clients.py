"""A client that travels in a pickle arrives as a client of its own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

import lmpool
from lmpool import PooledLM, SyncPooledLM
from lmpool.errors import ClientClosed
from lmpool.settings import ClientOptions
from tests.support.clients import connected


class Mine(PooledLM):
    """Somebody's own."""


def blocking(lm: PooledLM | SyncPooledLM) -> SyncPooledLM:
    return lm.sync if isinstance(lm, PooledLM) else lm


@pytest.mark.parametrize("travel", [lambda lm: pickle.loads(pickle.dumps(lm)), copy.deepcopy])
def test_it_connects_anew(
    travel: Callable[[PooledLM | SyncPooledLM], PooledLM | SyncPooledLM],
    any_server: str,
    pool: str,
) -> None:
    with connected(any_server, pool, request_timeout=20.0) as lm:
        row = lm.next_token_logprobs_sync([1, 2])
        for sent in (lm, lm.sync, Mine(ClientOptions(url=any_server, pool=pool))):
            arrived = travel(sent)
            assert type(arrived) is type(sent)
            assert arrived.options == sent.options
            with arrived:
                np.testing.assert_array_equal(blocking(arrived).next_token_logprobs([1, 2]), row)
                assert arrived.statistics()["requests"] == 1
            with pytest.raises(ClientClosed):
                blocking(arrived).next_token_logprobs([3])
            sent.close() if sent.options is not lm.options else None
        assert lm.next_token_logprobs_sync([5]).shape == row.shape, "it was closed with its copy"


def test_an_embedded_pool_is_not_owned_by_who_gets_it(server_binary: str) -> None:
    with lmpool.embedded(engine="mock", framework="numpy") as lm:
        arrived = pickle.loads(pickle.dumps(lm))
        assert type(arrived) is PooledLM
        with arrived:
            row = arrived.next_token_logprobs_sync([1, 2])
        np.testing.assert_array_equal(lm.next_token_logprobs_sync([1, 2]), row)

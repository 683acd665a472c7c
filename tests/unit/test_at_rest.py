"""What tests wait for until a pool is at rest."""

from __future__ import annotations

from typing import Any, cast

import pytest
import redis

from tests.support import pools


def test_a_stream_that_is_yet_to_be_made_anew_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Exception] = [redis.exceptions.ResponseError("NOGROUP No such key 'jobs:38'")]

    def look(*_: Any) -> None:
        if answers:
            raise answers.pop()

    monkeypatch.setattr(pools, "assert_at_rest", look)
    pools.until_at_rest(cast(redis.Redis, None), "pool", 5)
    assert not answers

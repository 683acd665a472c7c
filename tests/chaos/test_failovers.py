"""Failovers by three Sentinels, with TLS and users, one after another under a load."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.replicated import ReplicatedPool
from tests.support.certificates import where_tls_is_spoken
from tests.support.waiting import until

pytestmark = [pytest.mark.server]

EVERY = 20.0
"""Seconds from one fault to the next."""
LONG = [pytest.mark.chaos, pytest.mark.timeout(700)]


@pytest.mark.parametrize(
    ("append_only", "seed", "seconds", "every"),
    [
        pytest.param(False, 1, 5.0, 2.0, id="short"),
        *(
            pytest.param(append_only, seed, 450.0, EVERY, marks=LONG, id=f"{name}-{seed}")
            for seed in (2, 3)
            for append_only, name in ((False, "empty"), (True, "AOF"))
        ),
    ],
)
def test_failovers_lose_nothing(
    append_only: bool, seed: int, seconds: float, every: float, server_binary: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"seed": seed, "append_only": append_only}
    if every < EVERY:  # the short one runs beside others
        options["patience"] = 60.0
    with replicated_pool(tmp_path, server_binary, **options) as pool:
        ends = time.monotonic() + seconds
        with pool.load() as load:
            until(lambda: load.answered() > 100, what="the load to begin")
            while time.monotonic() < ends:
                next_one = time.monotonic() + every
                pool.befall(load)
                time.sleep(max(0.0, next_one - time.monotonic()))
        pool.check_nothing_left()
        found = load.outcomes
        print(f"{found.asked} prompts, {pool.longest_return:.1f} s; {', '.join(pool.done)}")
        assert found.wrong == 0
        assert found.failed == [], sorted(set(found.failed))
        assert found.right == found.asked
        assert not [what for what in pool.done if what.startswith("a worker ended")], pool.done
        assert pool.longest_return < pool.back_within


@contextmanager
def replicated_pool(*arguments: Any, **options: Any) -> Iterator[ReplicatedPool]:
    """One that is up, where the server speaks TLS."""
    with where_tls_is_spoken(ReplicatedPool(*arguments, **options)) as pool:
        yield pool

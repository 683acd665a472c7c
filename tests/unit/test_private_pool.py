"""What a private pool tells of its workers' words."""

from __future__ import annotations

import pytest

from lmpool.producer.embedded import private_pool


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("00:00:01 ERROR   lmpool.a: model='x': nothing there", "model='x': nothing there"),
        ("[gpu 1] 00:00:01 ERROR   lmpool.a: of one of several", "of one of several"),
        ("00:00:01 ERROR   lmpool.a: first\n00:00:02 ERROR   lmpool.b: two\nlines", "two\nlines"),
        ("00:00:01 ERROR   lmpool.a: this\n00:00:02 INFO    lmpool.b: not this", "this"),
        ("00:00:01 ERROR   lmpool.a: this\n00:00:01 ERROR   lmpool.worker.launcher: no", "this"),
        ("lmpool worker: batch_size=0: too small", "batch_size=0: too small"),
        ("nothing of the kind", ""),
    ],
)
def test_the_last_complaint_is_found_in_the_log(said: str, complaint: str) -> None:
    assert private_pool._last_complaint(said) == complaint

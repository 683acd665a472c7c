"""What a private pool tells of its workers' words."""

from __future__ import annotations

import pytest

from lmpool.producer.embedded import private_pool

AT = "2026-01-02T00:00:01+0000"
JSON = f'{{"time": "{AT}", "level": "ERROR", "logger": "lmpool.a", "message": "a: b"}}'


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (f"{AT} ERROR   lmpool.a: model='x': nothing there", "model='x': nothing there"),
        (f"{AT} ERROR   lmpool.a pool=p worker=w: model='x': none", "model='x': none"),
        (f"[gpu 1] {AT} ERROR   lmpool.a: of one of several", "of one of several"),
        (f"{AT} ERROR   lmpool.a: first\n{AT} ERROR   lmpool.b: two\nlines", "two\nlines"),
        (f"{AT} ERROR   lmpool.a: this\n{AT} INFO    lmpool.b: not this", "this"),
        (f"{AT} ERROR   lmpool.a: this\n{AT} ERROR   lmpool.worker.launcher: no", "this"),
        (f"{JSON}\n{JSON.replace('ERROR', 'INFO')}", "a: b"),
        (JSON.replace('{"time"', '{"place": "gpu 1", "time"'), "a: b"),
        ("lmpool worker: batch_size=0: too small", "batch_size=0: too small"),
        ("nothing of the kind", ""),
    ],
)
def test_the_last_complaint_is_found_in_the_log(said: str, complaint: str) -> None:
    assert private_pool._last_complaint(said) == complaint

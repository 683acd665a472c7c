from __future__ import annotations

import gc

import pytest

from lmpool.garbage import keep_what_is_there, uncollected


def test_nothing_is_collected_meanwhile_and_as_before_afterwards() -> None:
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()


def test_what_is_there_is_kept_and_garbage_is_not() -> None:
    class Thing:
        gone: list[bool] = []

        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            self.gone.append(True)

    Thing()
    there = [Thing()]
    before = gc.get_freeze_count()
    keep_what_is_there()
    assert gc.get_freeze_count() > before
    assert Thing.gone == [True]
    assert there

"""What a pipeline is tested with: a pool whose answers a test sets, and fixtures of pytest.

::

    def test_the_likeliest_word_is_chosen(lmpool_fake):
        lmpool_fake.answer([1, 2], {5: 0.7, 6: 0.2})
        assert choose(lmpool_fake.lm, [1, 2]) == 5

`MockPool` is such a pool: a worker in this process, on fakeredis or on a server of its own.
The fixtures are in `lmpool.testing.plugin`, which pytest finds by itself. See docs/testing.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmpool.testing.answers import Call
    from lmpool.testing.fake_server import FakeServer
    from lmpool.testing.mock_pool import MockPool

__all__ = ["Call", "FakeServer", "MockPool"]


if not TYPE_CHECKING:  # which knows them by their imports above

    def __getattr__(name):
        # Each run of pytest reads the plug-in, and few of them need what is behind these names.
        from importlib import import_module

        modules = {"Call": "answers", "FakeServer": "fake_server", "MockPool": "mock_pool"}
        if name not in modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{modules[name]}"), name)

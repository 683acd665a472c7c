"""lmpool: full-vocabulary next-token log-probabilities from a pool of language-model workers.

::

    import lmpool

    with lmpool.embedded("tiny", engine="hf", workers=2) as lm:
        row = lm.sync.next_token_logprobs([1, 5, 9])

    async with lmpool.connect("redis://localhost:6379/0", pool="llama") as lm:
        row = await lm.next_token_logprobs(ids)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmpool import errors
from lmpool.errors import LmpoolError
from lmpool.release import VERSION

if TYPE_CHECKING:
    from lmpool.producer import (
        Ask,
        EmbeddedLM,
        Head,
        NumpyRows,
        Piece,
        PooledLM,
        SyncPooledLM,
        TorchRows,
        connect,
    )
    from lmpool.producer.embedded import embedded

__version__ = VERSION

__all__ = [
    "Ask",
    "EmbeddedLM",
    "Head",
    "LmpoolError",
    "NumpyRows",
    "Piece",
    "PooledLM",
    "SyncPooledLM",
    "TorchRows",
    "__version__",
    "connect",
    "embedded",
    "errors",
]


if not TYPE_CHECKING:  # which knows them by their imports above

    def __getattr__(name):
        # The producer side is read when it is asked for: workers never need it.
        if name in __all__:
            from lmpool import producer

            return getattr(producer, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

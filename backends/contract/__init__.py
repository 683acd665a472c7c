"""The contract of every engine, as tests: a pytest class to derive from.

::

    from lmpool.backends.contract import EngineContract

    class TestMyEngine(EngineContract):
        engine = "mine"                 # its name in the entry-point group lmpool.engines
        options = {"device": "cpu"}     # what it is opened with
        bounded = {"cache_bytes": 1 << 20}

pytest then runs the whole suite against it. `pip install 'lmpool[contract]'` brings what it needs.
"""

import pytest

_ASSERTING = ("adapters", "asking", "continuations", "life", "rows", "subject")
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _ASSERTING))

from lmpool.backends.contract.asking import ask, request_for  # noqa: E402
from lmpool.backends.contract.reference import Reference, write_adapter  # noqa: E402
from lmpool.backends.contract.subject import Adapter  # noqa: E402
from lmpool.backends.contract.suite import EngineContract  # noqa: E402

__all__ = ["Adapter", "EngineContract", "Reference", "ask", "request_for", "write_adapter"]

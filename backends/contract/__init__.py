"""The contract of every engine, as tests: a pytest class to derive from.

::

    from lmpool.backends.contract import EngineContract

    class TestMyEngine(EngineContract):
        engine = "mine"                 # its name in the entry-point group lmpool.engines
        options = {"device": "cpu"}     # what it is opened with
        bounded = {"cache_bytes": 1 << 20}

pytest then examines it: random scenarios of all that a worker can do to its engine, judged by a
model of what was asked. ``pytest --pyargs lmpool.backends.contract --engine mine`` does the same
without a class. `pip install 'lmpool[contract]'` brings what it needs.
"""

from lmpool.backends.contract.adapter_files import write_adapter
from lmpool.backends.contract.asking import ask, request_for
from lmpool.backends.contract.examination import PARTS, Failure, examine
from lmpool.backends.contract.reference import Reference
from lmpool.backends.contract.subject import Adapter
from lmpool.backends.contract.suite import EngineContract

__all__ = [
    "PARTS",
    "Adapter",
    "EngineContract",
    "Failure",
    "Reference",
    "ask",
    "examine",
    "request_for",
    "write_adapter",
]

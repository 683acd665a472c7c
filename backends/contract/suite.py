"""What a worker relies on in its engine, one test for each promise."""

from __future__ import annotations

from lmpool.backends.contract.adapters import AdapterContract
from lmpool.backends.contract.continuations import ContinuationContract
from lmpool.backends.contract.life import LifeContract
from lmpool.backends.contract.rows import RowContract


class EngineContract(RowContract, AdapterContract, ContinuationContract, LifeContract):
    """Derive from this as ``class TestMine(EngineContract)``, and pytest runs every test on it.

    The rows must be within `tolerance` (nats, float32 [vocab]) of `reference`: transformers in
    float32, unless you override it. The engine is opened with `options` by `open_engine`, and with
    `bounded` on top where a test looks at memory: options under which all that the engine keeps
    between batches is there after 1,500 prompts of 4 tokens. `lacks` maps a name of `FEATURES` to
    the reason why the engine does not have it: its tests are then reported as skipped with that
    reason, and another test sees to it that the engine refuses.

    The model needs 64 tokens of vocabulary and 48 of length at least, and a Llama's names of layers
    where the engine has adapters.
    """

"""What a worker relies on in its engine, as tests of pytest."""

from __future__ import annotations

import secrets
import time
from typing import ClassVar

import pytest

from lmpool.backends.contract.examination import Examination, Failure
from lmpool.backends.contract.subject import Subject

SHRINK_SECONDS = 20.0


class EngineContract(Subject):
    """Derive from this as ``class TestMine(EngineContract)``, and pytest examines the engine.

    The rows must be within `tolerance` (nats, float32 [vocab]) of `reference`: transformers in
    float32, unless you override it; then `vocabulary` may say what the tokens are. The engine is
    opened with `options` by `open_engine`, and with `bounded` on top where memory is looked at:
    options under which all that the engine keeps between batches is there after 1,500 prompts of 4
    tokens. With `otherwise` on top its rows are others, if only by rounding. `lacks` maps a name of
    `FEATURES` to the reason why the engine does not have it, and the contract then sees to it that
    the engine refuses. An engine may refuse more adapters than `most_adapters`, and is not asked
    for temperatures above `most_temperature`. With `own_draws` it draws tokens by a generator of
    its own: its continuations are then judged by how they are distributed, and not token by token
    as those that are drawn by `lmpool.backends.sampling`. `seed` is that of the scenarios.

    Libraries leave something of each adapter that was loaded (safetensors some numbers of each
    tensor): up to `left_by_adapter` objects are not the engine's fault.

    The model needs 64 tokens of vocabulary and 48 of length at least, and a Llama's names of layers
    where the engine has adapters. Prompts longer than 4,096 tokens are not tried.
    """

    _examination: ClassVar[Examination | None] = None

    def examine(self, part: str, config: pytest.Config) -> None:
        """One part, again with random seeds as long as ``--engine-seconds`` says."""
        seed = config.getoption("--engine-seed", default=None)
        seconds: float = config.getoption("--engine-seconds", default=None) or 0.0
        end = time.monotonic() + seconds
        if seed == "random":
            seed = secrets.randbits(32)
        self._run(part, type(self).seed if seed is None else int(seed))
        while time.monotonic() < end:
            self._run(part, secrets.randbits(32))

    def _run(self, part: str, seed: int) -> None:
        cls = type(self)
        if cls._examination is None:
            cls._examination = Examination(cls, seed=seed, shrink_seconds=SHRINK_SECONDS)
        cls._examination.seed = seed
        failure: str | None = None
        try:
            cls._examination.run(part)
        except Failure as failed:
            failure = str(failed)
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    @classmethod
    def teardown_class(cls) -> None:
        """Close what was opened."""
        examination, cls._examination = cls._examination, None
        if examination is not None:
            examination.close()

    def test_says(self, pytestconfig: pytest.Config) -> None:
        """What it says of itself is true."""
        self.examine("says", pytestconfig)

    def test_rows(self, pytestconfig: pytest.Config) -> None:
        """Every prompt has its own row, whatever it resembles."""
        self.examine("rows", pytestconfig)

    def test_company(self, pytestconfig: pytest.Config) -> None:
        """So it has in batches of every size, among others of every kind."""
        self.examine("company", pytestconfig)

    def test_answers(self, pytestconfig: pytest.Config) -> None:
        """What follows from a row is that of the prompt's own."""
        self.examine("answers", pytestconfig)

    def test_continuations(self, pytestconfig: pytest.Config) -> None:
        """Tokens are drawn from the rows, by their seed and temperature."""
        self.examine("continuations", pytestconfig)

    def test_cancelling(self, pytestconfig: pytest.Config) -> None:
        """Requests can be cancelled, and the others do not notice."""
        self.examine("cancelling", pytestconfig)

    def test_kept_state(self, pytestconfig: pytest.Config) -> None:
        """What is kept of prompts, or dropped, changes no answer."""
        self.examine("kept_state", pytestconfig)

    def test_adapters(self, pytestconfig: pytest.Config) -> None:
        """Rows are by the right adapter, whatever comes and goes."""
        if "adapters" in self.lacks:
            pytest.skip(f"the engine {self.engine} lacks adapters: {self.lacks['adapters']}")
        self.examine("adapters", pytestconfig)

    def test_life(self, pytestconfig: pytest.Config) -> None:
        """All of that in any order."""
        self.examine("life", pytestconfig)

    def test_adapter_folders(self, pytestconfig: pytest.Config) -> None:
        """A folder that holds no adapter of the model is refused."""
        if "adapters" not in self.lacks and "adapter files" in self.lacks:
            why = self.lacks["adapter files"]
            pytest.skip(f"the engine {self.engine} reads no adapter files: {why}")
        self.examine("adapter_folders", pytestconfig)

    def test_ends(self, pytestconfig: pytest.Config) -> None:
        """Engines live beside each other, and are closed."""
        self.examine("ends", pytestconfig)

    def test_memory(self, pytestconfig: pytest.Config) -> None:
        """Memory does not grow."""
        self.examine("memory", pytestconfig)

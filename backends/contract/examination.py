"""An engine under examination: each part of the contract in its turn, and what it found."""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from lmpool.backends.contract.breaches import BrokenPromise
from lmpool.backends.contract.ends import check_closed, check_identity, check_reopened, check_second
from lmpool.backends.contract.folders import check_folders
from lmpool.backends.contract.heads import read_head
from lmpool.backends.contract.memory import check_memory
from lmpool.backends.contract.model import Model
from lmpool.backends.contract.operations import Operation, Settle, described
from lmpool.backends.contract.says import check_says
from lmpool.backends.contract.scenarios import SCENARIOS
from lmpool.backends.contract.script import Script
from lmpool.backends.contract.shrinking import shrunk
from lmpool.backends.contract.subject import FEATURES, Subject
from lmpool.backends.contract.truth import Truth
from lmpool.backends.contract.wants import References
from lmpool.backends.engine import Engine

PARTS: Final = ("says", *SCENARIOS, "adapter_folders", "ends", "memory")
"""All there is, in the order in which it is examined."""


class Failure(AssertionError):
    """A promise that an engine broke: `part`, `promise`, what was `seen`, and the operations."""

    def __init__(
        self,
        suite: type[Subject],
        part: str,
        seed: int,
        broken: BrokenPromise,
        operations: Sequence[Operation] = (),
        of: int = 0,
    ) -> None:
        self.part = part
        self.seed = seed
        self.promise = broken.promise
        self.seen = broken.seen
        self.operations = tuple(operations)
        lines = [
            f"the engine {suite.engine!r} breaks a promise ({part}, seed {seed}):",
            f"  {broken.promise}",
            f"  {broken.seen}",
        ]
        if operations:
            lines.append(f"after these {len(operations)} of {of} operations:")
            lines.append(described(operations))
        where = f"seed = {seed} in {suite.__name__}, and -k {part}"
        lines.append(f"It is repeated by --engine-seed {seed} -k {part} (or {where})")
        super().__init__("\n".join(lines))


class Examination:
    """Examines the engine of `suite`, opening as few as it can.

    A scenario that fails is made smaller for `shrink_seconds`.
    """

    def __init__(self, suite: type[Subject], *, seed: int, shrink_seconds: float = 0.0) -> None:
        unknown = set(suite.lacks) - FEATURES
        if unknown:
            raise ValueError(f"lacks={sorted(unknown)}: {sorted(FEATURES)} can be lacking")
        self.suite = suite
        self.seed = seed
        self._shrink_seconds = shrink_seconds
        self._temporary = tempfile.TemporaryDirectory(prefix="engine-contract-")
        self._folder = Path(self._temporary.name)
        self._engine: Engine | None = None
        self._truth: Truth | None = None
        self._history: list[Operation] = []
        """Everything that was done to the engine since it was opened."""
        # Before the engine: its library may change how models are loaded in this process.
        suite.reference([[0]])

    def close(self) -> None:
        """Close the engine, and remove the adapters."""
        self._drop()
        self._temporary.cleanup()

    def run(self, part: str) -> None:
        """Examine one of `PARTS`. Raises `Failure`."""
        try:
            if part in SCENARIOS:
                self._scenario(part)
            elif part == "memory":
                self._memory()
            else:
                engine, model, truth = self._opened()
                if part == "says":
                    check_says(engine, truth)
                elif part == "adapter_folders":
                    check_folders(engine, model, truth, self._folder / "wrong")
                else:
                    self._ends(engine, model, truth)
        except BrokenPromise as broken:
            self._drop()
            raise Failure(self.suite, part, self.seed, broken) from broken
        except BaseException:
            self._drop()
            raise

    # --- engines -------------------------------------------------------------------------------

    def _opened(self) -> tuple[Engine, Model, Truth]:
        """The engine that the parts share, what is known of it, and what is right."""
        if self._engine is None:
            self._engine = self.suite.open_engine()
            if self._truth is None or self._truth.info != self._engine.info:
                self._truth = Truth(self.suite, self._engine.info, self._folder)
                self._truth.check_reference()
            self._truth.head = read_head(self._engine)
            self._references = References()
            self._model = Model(self._engine, self._truth, self._references)
            self._history = []
        assert self._truth is not None
        return self._engine, self._model, self._truth

    def _drop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            with suppress(Exception):
                engine.close()

    # --- parts ---------------------------------------------------------------------------------

    def _script(self, part: str) -> Script:
        _, _, truth = self._opened()
        random = np.random.default_rng([self.seed % 2**64, zlib.crc32(part.encode())])
        return Script(random, truth, self._references)

    def _scenario(self, part: str) -> None:
        _, model, truth = self._opened()
        script = self._script(part)
        SCENARIOS[part](script)
        script.settle()
        begun = len(self._history)
        for operation in script.operations:
            self._history.append(operation)
            try:
                model.apply(operation)
            except BrokenPromise as broken:
                self._drop()
                self._shrink(part, truth, broken, begun)

    def _shrink(self, part: str, truth: Truth, broken: BrokenPromise, begun: int) -> None:
        """Raise the `Failure` of the fewest operations that a fresh engine needs for it."""
        end = time.monotonic() + self._shrink_seconds

        def fails(operations: Sequence[Operation]) -> bool:
            return time.monotonic() < end and self._breaks(operations, truth, broken.promise)

        whole = list(self._history)
        found = next((some for some in (whole[begun:], whole) if fails(some)), None)
        fewest = whole[begun:] if found is None else shrunk(found, fails)
        raise Failure(
            self.suite, part, self.seed, self._last or broken, fewest, len(whole)
        ) from broken

    _last: BrokenPromise | None = None

    def _breaks(self, operations: Sequence[Operation], truth: Truth, promise: str) -> bool:
        engine = self.suite.open_engine()
        try:
            model = Model(engine, truth, References())
            for operation in (*operations, Settle()):
                model.apply(operation)
        except BrokenPromise as broken:
            if broken.promise == promise:
                self._last = broken
            return broken.promise == promise
        finally:
            with suppress(Exception):
                engine.close()
        return False

    def _ends(self, engine: Engine, model: Model, truth: Truth) -> None:
        beside = check_second(engine, model, self._script("ends"))
        check_identity(engine, truth)
        check_closed(engine, model)
        self._drop()
        if not beside:
            check_reopened(engine, truth)

    def _memory(self) -> None:
        self._drop()
        engine = self.suite.open_engine(**self.suite.bounded)
        try:
            check_memory(engine, Truth(self.suite, engine.info, self._folder))
        finally:
            with suppress(Exception):
                engine.close()


def examine(
    suite: type[Subject],
    *,
    seed: int = 0,
    parts: Sequence[str] = PARTS,
    shrink_seconds: float = 0.0,
) -> Failure | None:
    """Examine an engine in this process, without pytest; the first failure, if there is one.

    The parts are those of `PARTS`.
    """
    examination = Examination(suite, seed=seed, shrink_seconds=shrink_seconds)
    part = ""
    try:
        for part in parts:
            examination.run(part)
    except Failure as failure:
        return failure
    except Exception as error:
        broken = BrokenPromise(
            "an engine raises nothing unasked", f"{type(error).__name__}: {error}"
        )
        return Failure(suite, part, seed, broken)
    finally:
        examination.close()
    return None

"""What is right of one engine: its reference, and what is known of its draws."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract.breaches import expect
from lmpool.backends.contract.heads import ReadHead
from lmpool.backends.contract.operations import AdapterFiles, Asked, Prompt
from lmpool.backends.contract.subject import Adapter, Subject
from lmpool.backends.engine import EngineInfo

Rows = npt.NDArray[np.float32]

FLOAT32_ERROR = 1e-5
"""Rows nearer than this to those in float32 were not computed in a narrower dtype."""

_ENOUGH_ROWS = 64


class Truth:
    """Judges by `suite.reference`; adapters are written into `folder`."""

    def __init__(self, suite: type[Subject], info: EngineInfo, folder: Path) -> None:
        self.suite = suite
        self.info = info
        self.tolerance = suite.tolerance
        self.head: ReadHead | None = None
        """That of the engine, where it has hidden states."""
        self._folder = folder
        self._adapters: dict[AdapterFiles, Adapter] = {}
        self._written: dict[AdapterFiles, Adapter] = {}
        self.narrow = 0
        """Rows that were the bits of bfloat16 logits."""
        self._compared = 0
        self._worst = 0.0

    def adapter(self, files: AdapterFiles) -> Adapter:
        """The adapter as it was written: those that differ by their name alone, in one folder."""
        found = self._adapters.get(files)
        if found is None:
            content = replace(files, name="")
            written = self._written.get(content)
            if written is None:  # never again: an engine may read the files of a folder later
                place = hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()
                how = dict(files.how)
                make = self.suite.make_adapter
                written = make(files.name, self._folder / place, files.seed, **how)
                self._written[content] = written
            found = self._adapters[files] = replace(written, name=files.name)
        return found

    def rows(self, prompts: Sequence[Prompt], adapter: Adapter | None) -> Rows:
        """The right rows, float32 [prompts, vocab]."""
        return self.suite.reference(prompts, adapter)

    def check_reference(self) -> None:
        """Raise `ValueError` where the reference is that of another model."""
        size, found = self.info.vocab_size, self.suite.reference([[0]]).shape[1]
        if found != size:
            raise ValueError(
                f"the reference's rows have {found} numbers, and the engine has a vocabulary of "
                f"{size}: where its rows are not those of the model {self.suite.model!r}, name "
                "their own reference (--engine-reference, or EngineContract.reference)"
            )

    def compare(
        self, asked: Sequence[Asked], rows: Sequence[Rows], adapter: Adapter | None
    ) -> None:
        """See to it that these are the rows of these prompts by this adapter."""
        right = self.rows([each.prompt for each in asked], adapter)
        found = np.stack(rows)
        errors = np.abs(found - right).max(axis=1)
        place = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
        worst = float(errors[place])
        expect(
            worst <= self.tolerance,
            "each row is that of its own prompt and adapter",
            f"off by {worst:.3g} nats: {asked[place]}{self._whose(found[place], asked, right)}",
        )
        totals = np.abs(np.exp(found, dtype=np.float64).sum(axis=1) - 1)
        place = int(totals.argmax())
        expect(
            float(totals[place]) < 1e-4,
            "rows are normalized",
            f"probabilities sum up to 1 {totals[place]:+.3g}: {asked[place]}",
        )
        self._compared += len(asked)
        self._worst = max(self._worst, worst)

    def _whose(self, row: Rows, asked: Sequence[Asked], right: Rows) -> str:
        """Whose row it is instead, among those that are judged together."""
        errors = np.abs(right - row).max(axis=1)
        nearest = int(errors.argmin())
        if not errors[nearest] <= self.tolerance:
            return ""
        return f" has the row of {asked[nearest]}"

    def check_info(self) -> None:
        """See to it that rows are what `info` says of them, once enough were compared."""
        dtype = self.info.dtype
        expect(
            dtype == "float32" or self._compared < _ENOUGH_ROWS or self._worst > FLOAT32_ERROR,
            "info.dtype is what the model computes in",
            f"it says {dtype}, and {self._compared} rows are within {self._worst:.1g} nats of "
            "those in float32",
        )
        expect(
            self.info.encoding != "bf16" or self._compared < _ENOUGH_ROWS or self.narrow > 0,
            "info.encoding is how the rows come",
            f"it says bf16, and {self._compared} rows were float32",
        )

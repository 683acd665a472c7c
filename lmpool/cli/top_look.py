"""A look at a pool for ``lmpool top``, and what follows from it and the one before."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lmpool.errors import LmpoolError

if TYPE_CHECKING:
    from lmpool.pool_view import PoolView, PoolViewer

COUNTED: Final = (
    *("computed", "batches", "failed", "expired", "evicted"),
    *("own_jobs", "stolen_jobs", "prompt_tokens", "computed_tokens"),
)


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen, and how it differs from what was seen before."""

    pool: str
    view: PoolView | None = None
    rates: dict[str, float] | None = None
    """By the name of what is counted, a second since the look before; None where nobody knows."""
    error: LmpoolError | None = None
    gone_at: float = 0.0
    """Since when, in seconds since 1970, there has been an error: view and rates are of before."""

    def next(self, viewer: PoolViewer) -> Look:
        """Look again."""
        try:
            view = viewer.read()
        except LmpoolError as error:
            gone_at = self.gone_at if self.error else time.time()
            return Look(self.pool, self.view, self.rates, error, gone_at)
        before = self.view if self.error is None else None
        return Look(self.pool, view, None if before is None else rates(before, view))

    def as_dict(self) -> dict[str, Any]:
        """The look for programs: `PoolView.as_dict`, and what follows from two looks."""
        if self.view is None or self.error is not None:
            return {"pool": self.pool, "error": str(self.error), "gone_at": self.gone_at}
        return {**self.view.as_dict(), "rates": self.rates, "error": None, "gone_at": None}


def rates(before: PoolView, now: PoolView) -> dict[str, float] | None:
    """What was counted a second between two looks; None where the counters began anew."""
    seconds = now.read_at - before.read_at
    if seconds <= 0 or before.model is None or now.model is None:
        return None
    if before.model["fingerprint"] != now.model["fingerprint"]:
        return None
    old: dict[str, Any] = {**before.statistics}
    new: dict[str, Any] = {**now.statistics}
    found = {name: (new[name] - old[name]) / seconds for name in COUNTED}
    for kind, number in now.statistics["answers"].items():
        found[f"answers_{kind}"] = (number - before.statistics["answers"].get(kind, 0)) / seconds
    return None if min(found.values()) < 0 else found

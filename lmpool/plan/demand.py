"""What is asked of a pool that is to be planned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lmpool.checks import quoted
from lmpool.errors import SettingsError
from lmpool.model_info import Encoding
from lmpool.plan.model import PlannedModel
from lmpool.rows import ENTRY_BYTES

MOST: Final = 1e15
"""What nobody has more of, of anything."""
MOST_TOKENS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked, of how many GPUs. Raises `SettingsError` for what cannot be.

    `prompt_rate` are those of all clients together, `prompt_tokens` the usual length,
    `wants` such as ``row``, ``top:20`` or ``top:20=0.8``. `distinct` is the part of the prompts
    that nobody has asked within `ttl` seconds: the others are answered by what is stored.
    `encoding` of None is the model's smallest lossless one. `memory` is that of a server which is
    there already, `gpu_memory` that of a GPU, in bytes, of which `engine` takes its part, or what
    `engine_opts` say. `lanes` are those of a shard.
    """

    model: PlannedModel
    prompt_rate: float
    wants: tuple[str, ...] = ("row",)
    gpus: int = 1
    prompt_tokens: int = 256
    ttl: float = 600.0
    distinct: float = 1.0
    clients: int = 1
    encoding: Encoding | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    engine: str = "auto"
    engine_opts: Mapping[str, Any] = field(default_factory=dict)
    cache_bytes: int = 256 << 20
    max_backlog: int = 100_000
    lanes: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_rate", "ttl", "memory", "gpu_memory"):
            self._check_positive(name, "a number above 0")
        for name in ("gpus", "prompt_tokens", "clients"):
            self._check_positive(name, "a whole number of 1 or more")
        if self.prompt_tokens > MOST_TOKENS:
            raise SettingsError(
                f"prompt_tokens={self.prompt_tokens!r}: at most {MOST_TOKENS} travel in one job"
            )
        if not (math.isfinite(self.distinct) and 0 < self.distinct <= 1):
            raise SettingsError(
                f"distinct={self.distinct!r}: write a number above 0, up to 1: which part of the "
                "prompts has not been asked before"
            )
        if self.encoding is not None and self.encoding not in ENTRY_BYTES:
            raise SettingsError(
                f"row_encoding={quoted(self.encoding)}: write one of {', '.join(ENTRY_BYTES)}"
            )
        if self.encoding == "bf16" and self.model.encoding != "bf16":
            raise SettingsError(
                f"row_encoding='bf16': the model computes in {self.model.dtype}, whose rows lose "
                "by it; write f32, or f16 where a loss does not matter"
            )
        if not self.wants:
            raise SettingsError("want: at least one is needed, such as row or top:20")

    def _check_positive(self, name: str, expected: str) -> None:
        found = getattr(self, name)
        if found is not None and not 0 < found <= MOST:  # NaN is neither
            raise SettingsError(f"{name}={found!r}: write {expected}, {MOST:g} at most")

"""One family: its small models on the engine, each row against a plain forward pass."""

from __future__ import annotations

import importlib
import json
import logging
import resource
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from lmpool.backends.contract import ask
from lmpool.backends.engine import Request
from lmpool.backends.hf import HFEngine
from lmpool.backends.model_config import LONGEST_PROMPT_NAMES
from lmpool.errors import AdapterError, LmpoolError
from tests.families.prompts import Prompt, Prompts
from tests.families.routers import margin_of_flip
from tests.families.small import FAMILIES, SCALES, Limits, small_configuration
from tests.families.variants import VARIANTS
from tests.families.weights import save_random_adapter, save_small

transformers: Any = importlib.import_module("transformers")
logger = logging.getLogger(__name__)

TOLERANCE: Final = 1e-3
"""Nats: by how much an entry of a row may differ from that of a plain forward pass."""
MEMORY: Final = 4 << 30
_BYTES: Final = 32 << 20
_ADAPTER: Final = "random"
_LONGEST_MESSAGE: Final = 600


@dataclass
class Found:
    """What became of one family, or of one variant of it."""

    name: str
    model_type: str
    cls: str
    verdict: str = "right"
    """Or refused, wrong, crash, unclear (a refusal that says too little), unbuilt."""
    ways: list[str] = field(default_factory=list)
    """How the engine says that it computes, at each scale."""
    worst: float = 0.0
    rows: int = 0
    flipped: int = 0
    margin: float = 0.0
    adapters: str = ""
    said: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


class _Wrong(Exception):
    """A row is not that of a plain forward pass."""


def names() -> list[str]:
    """All families of transformers' mapping, and all variants."""
    return [*FAMILIES, *VARIANTS]


def failed(name: str, how: str) -> Found:
    """What is known of one whose process gave nothing."""
    model_type = VARIANTS[name].model_type if name in VARIANTS else name
    return Found(name, model_type, FAMILIES[model_type], verdict="crash", said=how)


def check_alone(name: str, folder: str, file: str, seed: int) -> None:
    """In a process of its own: check one family within its memory, and write what was found."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    logging.getLogger("lmpool").setLevel(logging.ERROR)
    Path(file).write_text(json.dumps(check(name, Path(folder), seed).as_json()))


def check(name: str, folder: Path, seed: int, scales: Sequence[Limits] = SCALES) -> Found:
    """Run a family, or a variant; nothing is raised."""
    model_type = VARIANTS[name].model_type if name in VARIANTS else name
    changes = VARIANTS[name].changes if name in VARIANTS else {}
    found = Found(name, model_type, FAMILIES[model_type])
    began = time.process_time()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings(action="ignore"):
        try:
            for number, limits in enumerate(scales):
                place = folder / str(number)
                try:
                    config = small_configuration(model_type, limits, **changes)
                    save_small(config, place, limits, seed)
                except Exception as error:
                    found.verdict, found.said = "unbuilt", _text(error)
                    break
                one = _Check(found, place, limits, seed + number)
                one.run(adapters=number == 0, tight=number == len(scales) // 2)
        except _Wrong as error:
            found.verdict, found.said = "wrong", str(error)
        except LmpoolError as error:
            clear = _is_clear(error, config, found)
            found.verdict, found.said = ("refused" if clear else "unclear"), str(error)
        except Exception as error:
            found.verdict, found.said = "crash", _text(error)
            logger.exception("%s", name)
    found.said = found.said.replace(str(folder), "FOLDER")
    found.seconds = round(time.process_time() - began, 1)
    return found


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_clear(error: LmpoolError, config: Any, found: Found) -> bool:
    """Whether a refusal names the model, in one sentence that a person reads to its end."""
    text = str(error)
    named = any(name in text for name in (found.cls, f"({found.model_type})", config.model_type))
    return named and len(text) < _LONGEST_MESSAGE and "\n" not in text


class _Check:
    """One scale of one family."""

    def __init__(self, found: Found, place: Path, limits: Limits, seed: int) -> None:
        self._found = found
        self._folder = str(place)
        self._seed = seed
        self._limits = limits
        self._rows: dict[tuple[Prompt, str | None], torch.Tensor] = {}
        self._model: Any = None
        self._adapted: Any = None
        self._options: dict[str, Any] | None = None

    def run(self, *, adapters: bool, tight: bool) -> None:
        """Raise what the engine raises, and `_Wrong`.

        Rows with adapters, and steps under eviction in a `tight` cache, take time of their own.
        """
        # One that refuses a model needs no rows of it.
        engine = self._engine()
        try:
            self._found.ways.append(engine.info.execution or "")
            load = transformers.AutoModelForCausalLM.from_pretrained
            self._model = load(self._folder, dtype=torch.float32).eval()
            longest = engine.info.max_prompt_tokens
            prompts = Prompts(self._limits.all, longest, self._seed)
            first = prompts.shared()
            for batch in (first, prompts.longer(first), prompts.beginnings()):
                self._compare(engine, [(prompt, None) for prompt in batch])
            if adapters:
                self._adapters(engine, first)
            slots = _slots(engine)
        finally:
            engine.close()
        if slots and tight:
            few = (longest + 20) * (slots[1] // slots[0])
            engine = self._engine(kv_cache_bytes=few, forward_tokens=max(29, longest // 3))
            try:
                for batch in prompts.steps():
                    self._compare(engine, [(prompt, None) for prompt in batch])
            finally:
                engine.close()

    def _engine(self, **options: Any) -> HFEngine:
        own = transformers.AutoConfig.from_pretrained(self._folder)
        own = own if own.is_encoder_decoder else own.get_text_config()
        bounds = [getattr(own, name, None) for name in LONGEST_PROMPT_NAMES]
        known = next((b for b in bounds if isinstance(b, int) and b > 0), None)
        if known is None or known > self._limits.longest:
            options = {"max_prompt_tokens": self._limits.longest, **options}
        return HFEngine(self._folder, device="cpu", **{"kv_cache_bytes": _BYTES, **options})

    def _adapters(self, engine: HFEngine, prompts: Sequence[Prompt]) -> None:
        place = Path(self._folder) / "adapter"
        load = transformers.AutoModelForCausalLM.from_pretrained
        try:
            base = load(self._folder, dtype=torch.float32)
            self._adapted = save_random_adapter(base, place, self._seed)
            if self._adapted is None:
                self._found.adapters = "no linear layers"
                return
        except Exception as error:
            self._found.adapters = f"PEFT cannot ({type(error).__name__})"
            return
        try:
            engine.add_adapter(_ADAPTER, str(place))
        except AdapterError as error:
            self._found.adapters = f"refused: {error}".replace(self._folder, "FOLDER")
            return
        mixed = [(p, _ADAPTER if i % 3 else None) for i, p in enumerate(prompts[:16])]
        self._compare(engine, mixed)
        self._compare(engine, [(p, None if i % 3 else _ADAPTER) for i, p in enumerate(prompts[:9])])
        self._found.adapters = "yes"

    def _compare(self, engine: HFEngine, asked: Sequence[tuple[Prompt, str | None]]) -> None:
        requests = [
            Request(b"%d" % i, np.array(prompt, np.uint32), adapter)
            for i, (prompt, adapter) in enumerate(asked)
        ]
        outcomes = ask(engine, requests)
        # In ascending order: some models' forward passes depend on the longest before them.
        for i in sorted(range(len(asked)), key=lambda i: len(asked[i][0])):
            error, (prompt, adapter) = outcomes[i].error, asked[i]
            if error is not None:
                raise RuntimeError(f"a prompt of {len(prompt)} tokens failed: {error}")
            row = torch.from_numpy(outcomes[i].logprobs().copy())
            self._judge(row, prompt, adapter)

    def _judge(self, row: torch.Tensor, prompt: Prompt, adapter: str | None) -> None:
        found, plain = self._found, self._plain(prompt, adapter)
        finite = plain.isfinite()
        off = (row - plain).abs()[finite]
        error = float(off.nan_to_num(torch.inf, torch.inf).max()) if off.numel() else 0.0
        found.rows += 1
        if error < TOLERANCE and bool((finite == row.isfinite()).all()):
            found.worst = max(found.worst, error)
            return
        model = self._model if adapter is None else self._adapted
        margin = margin_of_flip(model, prompt, row, TOLERANCE)
        if margin is None:
            raise _Wrong(
                f"a row after {len(prompt)} tokens{' with an adapter' if adapter else ''} is off "
                f"by {error:.2g}, limits {self._limits.all}, computed: {found.ways[-1]}"
            )
        found.flipped += 1
        found.margin = max(found.margin, margin)

    def _options_of(self, model: Any) -> dict[str, Any]:
        """Nothing, or what a plain forward pass of this model needs not to raise."""
        if self._options is None:
            try:
                with torch.inference_mode():
                    model(torch.tensor([[1, 2, 3]]))
                self._options = {}
            except Exception:  # some models' own caches are broken
                self._options = {"use_cache": False}
        return self._options

    def _plain(self, prompt: Prompt, adapter: str | None) -> torch.Tensor:
        known = self._rows.get((prompt, adapter))
        if known is None:
            model = self._model if adapter is None else self._adapted
            with torch.inference_mode():
                ids = torch.tensor([prompt])
                logits = model(ids, **self._options_of(model)).logits[0, -1].float()
            known = self._rows[prompt, adapter] = torch.log_softmax(logits, -1)
        return known


def _slots(engine: HFEngine) -> tuple[int, int] | None:
    """How many slots the engine keeps, and in how many bytes."""
    statistics = engine.statistics()
    return None if statistics is None else (statistics.slots, engine.kv_cache_bytes())

"""A vLLM engine under test: small, quick to start, and watched by its scheduler."""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends import Outcome, contract, load_engine, tiny
from lmpool.backends.contract import ask
from tests.support.engines import requests_of

Prompts = list[npt.NDArray[np.uint32]]

TOLERANCE = 5e-5
VOCAB = 2000
QUICK = {"enforce_eager": True, "kv_cache_memory_bytes": 96 << 20}
"""What every test's vLLM is told: compile nothing, and take little memory."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "CRITICAL"}
"""Several engines on two cores wait for each other least with a thread each."""


def need_vllm() -> None:
    """Import vLLM, whose imports warn of much; skip without it, unless engines are required."""
    os.environ.update(ENVIRONMENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if os.environ.get("LMPOOL_REQUIRE_SERVERS"):
            importlib.import_module("vllm")
        else:
            pytest.importorskip("vllm")
        importlib.import_module("lmpool.backends.vllm")
        importlib.import_module("vllm.v1.worker.gpu_model_runner")
        importlib.import_module("torch").set_num_threads(1)
    _spare_the_imported()
    # vLLM looks at the class of a model that is new to it in a process that imports vLLM again, so
    # that this one has not touched a GPU when it forks.
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()


def _spare_the_imported() -> None:
    """Let no engine that is made or closed search all that was imported for garbage, again.

    vLLM does so four times an engine, which takes longer than everything else it does.
    """
    core = importlib.import_module("vllm.v1.engine.core")
    if getattr(core.freeze_gc_heap, "spared", False):
        return
    gc.collect()
    gc.freeze()

    def nothing() -> None:
        pass

    nothing.spared = True  # type: ignore[attr-defined]
    core.freeze_gc_heap = nothing  # what is frozen is never freed: not an engine's own
    gc.unfreeze = nothing


@contextmanager
def vllm_engine(*, spawned: bool = False, **options: Any) -> Iterator[Any]:
    """A `VLLMEngine` of the tiny model, closed at the end.

    Its further processes are forked from one that has imported vLLM, which takes them ten seconds
    of a core; `spawned`: they do that themselves, as a user's.
    """
    with ExitStack() as stack:
        if not spawned:
            for place in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
                module = importlib.import_module(place)
                stack.enter_context(patch.object(module, "get_mp_context", _Imported))
        engine = load_engine("vllm", options.pop("model", "tiny"), **{**QUICK, **options})
    try:
        yield engine
    finally:
        engine.close()


class _Imported:
    """A context of multiprocessing, of processes that begin with vLLM imported, and no thread."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, *_OF_A_CORE])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(  # noqa: N802
        self,
        *,
        target: Callable[..., None],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        """One in the environment of its start, not in that of the process it is forked from."""
        given = (_Environment(), target, args, kwargs or {})
        return self._context.Process(target=_run_in, args=given, **more)  # type: ignore[attr-defined]


_OF_A_CORE = (
    "lmpool.backends.vllm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


class _Environment:
    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(os.environ),)  # as a process is started


def _run_in(
    environment: dict[str, str],
    target: Callable[..., None],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args, **kwargs)


@contextmanager
def reducing_engine(**options: Any) -> Iterator[Any]:
    """One that reduces rows where the logits are, as on a GPU."""
    with vllm_engine(**options) as engine:
        assert not engine._reduces
        engine._reduces = True
        yield engine


def prompts(count: int, longest: int, seed: int = 0, shared: int = 0) -> Prompts:
    """Random prompts of 1 to `longest` tokens, after `shared` tokens that all have."""
    rng = np.random.default_rng(seed)
    head = rng.integers(3, VOCAB, shared)
    return [
        np.concatenate([head, rng.integers(3, VOCAB, rng.integers(1, longest + 1))]).astype(
            np.uint32
        )
        for _ in range(count)
    ]


def drain(engine: Any) -> dict[bytes, Outcome]:
    """Every outcome until nothing is in flight."""
    outcomes: dict[bytes, Outcome] = {}
    while engine.in_flight():
        for outcome in engine.step():
            assert outcome.id not in outcomes
            outcomes[outcome.id] = outcome
    return outcomes


def answer(engine: Any, given: Sequence[npt.NDArray[np.uint32]], **more: Any) -> list[Outcome]:
    """The prompts' outcomes in their order."""
    return ask(engine, requests_of(given, **more))


def scheduler(engine: Any) -> Any:
    """The scheduler of an engine in this process."""
    return engine._core.engine_core.scheduler


def assert_rows(outcomes: Sequence[Outcome], expected: npt.NDArray[np.float32]) -> None:
    """Every outcome is its own prompt's row."""
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert not failed, failed[:3]
    rows = np.stack([outcome.logprobs() for outcome in outcomes])
    worst = np.abs(rows - expected).max(axis=1)
    assert worst.max() <= TOLERANCE, (int((worst > TOLERANCE).sum()), float(worst.max()))


def assert_nothing_left(engine: Any) -> None:
    """vLLM holds no request but the live ones, and no row; when those have ended, no block."""
    core = scheduler(engine)
    assert engine.in_flight() == 0
    assert len(core.requests) == len(engine._live)
    assert len(core.running) == 0
    capture = _capture(engine)
    assert len(capture.rows) == 0
    assert capture.scorer is None or len(capture.scorer) == 0
    engine.clear_cache()
    assert len(core.requests) == 0
    assert engine._live.reserved_tokens == 0
    pool = core.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is a placeholder
    engine._core.get_output()  # the worker hears of what has ended
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    assert not runner.requests


def _capture(engine: Any) -> Any:
    from lmpool.backends.vllm import internals

    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    capture = internals.find_capture(runner)
    assert capture is not None
    return capture


class Watched:
    """Counts what vLLM's scheduler does while the block runs."""

    def __init__(self, engine: Any) -> None:
        self.tokens: list[int] = []
        self.preempted = 0
        self._scheduler = scheduler(engine)

    def __enter__(self) -> Watched:
        schedule, preempt = self._scheduler.schedule, self._scheduler._preempt_request

        def counted(*given: Any, **named: Any) -> Any:
            output = schedule(*given, **named)
            self.tokens.append(output.total_num_scheduled_tokens)
            return output

        def preempting(*given: Any, **named: Any) -> Any:
            self.preempted += 1
            return preempt(*given, **named)

        self._scheduler.schedule, self._scheduler._preempt_request = counted, preempting
        return self

    def __exit__(self, *_: object) -> None:
        del self._scheduler.schedule, self._scheduler._preempt_request


def spoiled_model(folder: Path, token: int) -> str:
    """The tiny model with a token that makes NaN of every row behind it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny.path(), folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(str(file))
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()  # it is tied, and every row would be NaN
    embedding[token] = float("nan")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    save_file(tensors, str(file), metadata={"format": "pt"})
    return str(folder)


def write_adapter(folder: Path, seed: int, rank: int = 4) -> str:
    """A LoRA adapter of the tiny model that moves its rows by nats."""
    return contract.write_adapter(folder, seed=seed, rank=rank, alpha=8.0 * rank)

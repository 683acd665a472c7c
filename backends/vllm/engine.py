"""vLLM as an engine: prompts join while others run, and every row is captured at the sampler.

Rows come from a logits processor inside vLLM's model runner (`capture`), which copies them in one
piece a step. A prompt whose row was given out stays live in vLLM for a while, so that the one which
extends it costs a decode step (`live`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from lmpool.backends.engine import Engine, EngineInfo, Outcome, Request, Tokens
from lmpool.backends.hf.packed_fit import default_kv_cache_bytes
from lmpool.backends.model_files import model_identity, resolve_model, tokenizer_files
from lmpool.backends.vllm import internals
from lmpool.backends.vllm.adapters import Shapes, check_adapter, weight_shapes
from lmpool.backends.vllm.live import LivePrompt, LivePrompts
from lmpool.backends.vllm.options import (
    CAPTURED_ROWS,
    NUMERIC,
    capture_processors,
    check_options,
)
from lmpool.backends.vllm.rows import FullLogprobs, Row, RowSource, row_source
from lmpool.backends.vocabulary import served_byte_vocabulary
from lmpool.errors import AdapterError, EngineBroken, PromptFailed, SettingsError

logger = logging.getLogger(__name__)

WAIT_SECONDS: Final = 0.02
"""How long a step waits for an engine in another process before new requests may join."""

STARVED_SECONDS: Final = 2.0
"""How long nothing may come out of vLLM before live prompts give up what they hold."""

MAX_SEED: Final = (1 << 63) - 1

MAX_TEMPERATURE: Final = 2.0
"""vLLM refuses more, and its engine would end with such a request."""

_MEMORY: Final = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization"})
"""Options that say how much memory vLLM takes."""

MOST_ADAPTERS: Final = 64
"""As many as a worker keeps loaded, and as many removed ones that requests in flight still use."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request that is to join, and the adapter that it was submitted with."""

    request: Request
    adapter: LoRARequest | None


@dataclass(slots=True, eq=False)
class _Running:
    """A request inside vLLM, and the adapter that it was submitted with."""

    id: str
    request: Request
    adapter: LoRARequest | None
    number: int
    live: LivePrompt | None
    alone: bool
    drawn: list[int] = field(default_factory=list)


class VLLMEngine(Engine):
    """Computes rows with vLLM.

    `model` is ``tiny``, a folder, or a hub id (then with an optional `revision`). `dtype` is
    ``float32``, ``bfloat16``, ``float16``, or ``auto``: float32 on a CPU, the model's own
    elsewhere. `max_prompt_tokens` lowers the model's own bound, which is one less than its longest
    sequence: vLLM wants room for a token more.

    `live_prompts` bounds the answered prompts that stay live (0: none; by default half of
    `max_num_seqs`). `own_process` puts vLLM's engine in a process of its own, as
    `tensor_parallel_size` above 1 does with its workers; by default it runs on the calling thread.
    `capture=False` reads rows through vLLM's own ``logprobs=-1``, many times slower. `engine_opts`
    are vLLM's `EngineArgs`: ``tensor_parallel_size``, ``gpu_memory_utilization``,
    ``enable_lora``, ``max_loras``, ``quantization`` and so on. On a CPU the memory for keys and
    values is that of the hf engine where none of them names it.

    Rows are float32 log-probabilities or, of a bfloat16 model, the bits of its logits. Raises
    `SettingsError` for a model or an option that cannot be used.
    """

    continuous: ClassVar[bool] = True

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        max_prompt_tokens: int | None = None,
        trust_remote_code: bool = False,
        live_prompts: int | None = None,
        own_process: bool = False,
        capture: bool = True,
        **engine_opts: Any,
    ) -> None:
        for name, value in (("own_process", own_process), ("capture", capture)):
            if not isinstance(value, bool):
                raise SettingsError(f"{name}={value!r}: true or false expected")
        if live_prompts is not None and (type(live_prompts) is not int or live_prompts < 0):
            raise SettingsError(f"live_prompts={live_prompts!r}: 0 or a positive integer expected")
        check_options(engine_opts, EngineArgs)
        self._engine: Any = None
        self._folder = resolve_model(model, revision)
        self._on_cpu = current_platform.is_cpu()
        if dtype == "auto" and self._on_cpu:
            dtype = "float32"
        arguments = _arguments(
            str(self._folder),
            dtype=dtype,
            max_prompt_tokens=max_prompt_tokens,
            trust_remote_code=trust_remote_code,
            given=engine_opts,
        )
        try:
            self._engine = internals.make_engine(arguments, own_process=own_process)
        except Exception as error:
            raise SettingsError(
                f"vLLM cannot serve {model!r}: {internals.root_cause(error)}"
            ) from error
        self._core = self._engine.engine_core
        config = self._engine.vllm_config
        self._lora = bool(engine_opts.get("enable_lora"))
        self._most_adapters = int(config.lora_config.max_cpu_loras) if self._lora else 0
        self._adapters: dict[str, LoRARequest] = {}
        self._adapter_numbers = 0
        self._shapes: Shapes | None = None
        self._numbers = 0
        self._leaving: list[LoRARequest] = []
        """Removed adapters of requests that have not ended yet."""
        self._waiting: deque[_Waiting] = deque()
        self._suspects: deque[_Waiting] = deque()
        """Requests whose logits were not finite, perhaps by the company that they had."""
        self._running: dict[str, _Running] = {}
        self._by_request: dict[bytes, str] = {}
        self._outcomes: list[Outcome] = []
        self._clearing = False
        """Whether the caches are to be dropped before anything else joins."""
        self._last_output = 0.0
        self._most_running = int(config.scheduler_config.max_num_seqs)
        self._live = LivePrompts(
            self._most_running // 2 if live_prompts is None else live_prompts,
            # So that one prompt of any length always finds room.
            internals.kv_tokens(self._engine) - int(config.model_config.max_model_len),
            int(config.cache_config.block_size),
        )
        self._rows: RowSource = FullLogprobs()
        try:
            self._rows = row_source(self._engine, capture=capture)
            self.info = self._describe(model, revision, trust_remote_code, engine_opts)
        except BaseException:
            self.close()
            raise

    def _describe(
        self, model: str, revision: str | None, code: bool, given: Mapping[str, Any]
    ) -> EngineInfo:
        config = self._engine.vllm_config.model_config
        dtype = str(config.dtype).removeprefix("torch.")
        identity: dict[str, object] = {
            "engine": "vllm",
            "dtype": dtype,
            "files": model_identity(self._folder, code=code),
        }
        identity.update({name: str(given[name]) for name in NUMERIC if given.get(name) is not None})
        info = EngineInfo(
            engine="vllm",
            model=model,
            revision=revision,
            vocab_size=int(config.get_vocab_size()),
            max_prompt_tokens=int(config.max_model_len) - 1,
            dtype=dtype,
            encoding="f32",
            identity=identity,
        )
        self.info = info
        probe = self._answer_one(Request(b"probe", np.zeros(1, np.uint32)))
        self.clear_cache()
        if probe.row is None:
            raise SettingsError(f"vLLM cannot serve {model!r}: its first prompt: {probe.error}")
        return _with_special_tokens(info, probe, config)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            reason = self._reason_to_refuse(request)
            if reason is None:
                adapter = None if request.adapter is None else self._adapters[request.adapter]
                self._waiting.append(_Waiting(request, adapter))
            else:
                self._outcomes.append(Outcome(request.id, error=PromptFailed(reason)))
        self._feed()

    def _reason_to_refuse(self, request: Request) -> str | None:
        tokens, longest = request.tokens, self.info.max_prompt_tokens
        if not 0 < tokens.size <= longest:
            return f"a prompt of {tokens.size} tokens: 1 to {longest} expected"
        if int(tokens.max()) >= self.info.vocab_size:
            return f"token id {int(tokens.max())}: below {self.info.vocab_size} expected"
        if request.adapter is not None and request.adapter not in self._adapters:
            return f"no adapter named {request.adapter!r} is loaded"
        sampling = request.sampling
        if sampling is not None and not 0.0 <= sampling.temperature <= MAX_TEMPERATURE:
            return (
                f"temperature={sampling.temperature!r}: a number from 0 to {MAX_TEMPERATURE:g} "
                "expected, which is what vLLM samples with"
            )
        return None

    def _feed(self) -> None:
        """Put into vLLM what may run beside what runs there."""
        if self._clearing and not self._running:
            self._drop_caches()
        if self._suspects and not self._running:
            suspect = self._suspects.popleft()
            self._begin(suspect.request, suspect.adapter, alone=True)
        while joining := self._next_to_join():
            for waiting in joining:
                self._begin(waiting.request, waiting.adapter)
        self._end_live()

    def _next_to_join(self) -> deque[_Waiting]:
        """Those waiting that may join now.

        vLLM's LoRA kernels for CPUs give base prompts the last slot's adapter when all slots are
        taken. So there base prompts and the others take turns, and a turn takes nobody in once the
        others wait.
        """
        waiting, none = self._waiting, deque[_Waiting]()
        running = next(iter(self._running.values()), None)
        if not waiting or self._clearing or self._suspects or (running and running.alone):
            return none
        if not (self._lora and self._on_cpu):
            self._waiting = none
            return waiting
        first = running or waiting[0]
        joining = deque(w for w in waiting if (w.adapter is None) == (first.adapter is None))
        if running is not None and len(joining) < len(waiting):
            return none
        self._waiting = deque(w for w in waiting if (w.adapter is None) != (first.adapter is None))
        return joining

    def _begin(self, request: Request, adapter: LoRARequest | None, *, alone: bool = False) -> None:
        sampling, tokens = request.sampling, request.tokens
        self._numbers += 1
        live: LivePrompt | None = None
        new = tokens
        if sampling is None:
            params = _params(1, 0.0, **self._rows.row(self._numbers))
            # By the name that no other loading of an adapter has.
            kept_for = None if adapter is None else adapter.lora_name
            live = self._live.extended_by(kept_for, tokens)
            if live is not None:
                new = tokens[live.answered :]
            else:
                live = self._live.begin(kept_for, tokens)
        else:
            limit = min(sampling.max_tokens, self.info.max_prompt_tokens + 1 - tokens.size)
            if limit <= 0:
                self._outcomes.append(Outcome(request.id, tokens=np.empty(0, np.uint32)))
                return
            params = _params(
                limit,
                sampling.temperature,
                seed=sampling.seed & MAX_SEED,
                stop_token_ids=[i for i in sampling.eos_token_ids if 0 <= i < self.info.vocab_size],
                **self._rows.watch(self._numbers),
            )
        name = f"once-{self._numbers}" if live is None else live.id
        self._live.shrink(self._most_running - len(self._running) - 1)
        self._end_live()
        if not self._running:
            self._last_output = time.monotonic()
        with internals.fatal():
            self._core.add_request(
                internals.make_request(
                    name,
                    new.tolist(),
                    params,
                    arrival=time.time(),
                    lora=adapter,
                    resumable=live is not None,
                )
            )
        self._running[name] = _Running(name, request, adapter, self._numbers, live, alone)
        self._by_request[request.id] = name

    def step(self) -> Sequence[Outcome]:
        self._work()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _work(self) -> None:
        """Let vLLM work once, where it has something to do."""
        if not self._running:
            return
        with internals.fatal():
            outputs = internals.step(self._core, WAIT_SECONDS)
        now = time.monotonic()
        if outputs:
            self._last_output = now
        elif now - self._last_output > STARVED_SECONDS:
            # A long prefill, or a cache divided in ways that its size does not tell: to end what is
            # idle costs little, and a prompt that waits for room without end much.
            self._live.shrink(0)
        ended: list[tuple[_Running, str]] = []
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            running.drawn.extend(output.new_token_ids)
            self._rows.see(running.number, output)
            if output.finish_reason is not None:
                ended.append((running, str(output.finish_reason)))
        if ended:
            self._finish(ended)
        self._feed()
        self._unload_unused()

    def _finish(self, ended: Sequence[tuple[_Running, str]]) -> None:
        with internals.fatal():
            rows = self._rows.take([running.number for running, _ in ended])
        for running, reason in ended:
            del self._running[running.id]
            del self._by_request[running.request.id]
            given_up = reason not in ("stop", "length")
            if running.live is not None:
                if given_up:
                    self._live.forget(running.live)
                else:
                    self._live.keep(running.live)
            if given_up:
                error = PromptFailed(f"vLLM gave this prompt up ({reason})")
                self._outcomes.append(Outcome(running.request.id, error=error))
            elif _is_unsound(row := rows.get(running.number)) and not running.alone:
                # vLLM's attention for CPUs lets NaN of one prompt into others of its step, and from
                # there it is cached. So nothing but what is not finite alone is a prompt's fault.
                self._suspects.append(_Waiting(running.request, running.adapter))
                self._clearing = True
            else:
                self._outcomes.append(_outcome(running, row))

    def _end_live(self) -> None:
        ended = self._live.take_ended()
        if ended:
            with internals.fatal():
                self._core.abort_requests(ended)

    def in_flight(self) -> int:
        held = (self._waiting, self._suspects, self._running, self._outcomes)
        return sum(map(len, held))

    def cancel(self, ids: Collection[bytes]) -> None:
        wanted = set(ids)
        self._waiting = deque(w for w in self._waiting if w.request.id not in wanted)
        self._suspects = deque(w for w in self._suspects if w.request.id not in wanted)
        self._outcomes = [outcome for outcome in self._outcomes if outcome.id not in wanted]
        aborted: list[_Running] = []
        for cancelled in wanted & self._by_request.keys():
            running = self._running.pop(self._by_request.pop(cancelled))
            if running.live is not None:
                self._live.forget(running.live)
            aborted.append(running)
        if aborted:
            with internals.fatal():
                self._core.abort_requests([running.id for running in aborted])
                self._rows.forget([running.number for running in aborted])
        self._feed()
        self._unload_unused()

    def _answer_one(self, request: Request) -> Outcome:
        """Run one request to its end; what else ends meanwhile is given out by the next step."""
        self.submit([request])
        while True:
            for outcome in self._outcomes:
                if outcome.id == request.id:
                    self._outcomes.remove(outcome)
                    return outcome
            self._work()

    def add_adapter(self, name: str, path: str) -> None:
        if not self._lora:
            raise AdapterError(
                f"adapter {name!r}: this worker's vLLM takes none; start it with engine_opts "
                '{"enable_lora": true, "max_loras": 4, "max_lora_rank": 64}'
            )
        if self._shapes is None:
            self._shapes = weight_shapes(self._folder)
        check_adapter(Path(path), self._shapes)
        while len(self._adapters) + len(self._leaving) >= self._most_adapters:
            if not self._leaving:
                raise AdapterError(
                    f"adapter {name!r}: {len(self._adapters)} are loaded, as many as this engine "
                    "keeps; remove one"
                )
            self._work()  # what uses a removed one is answered first
        self._adapter_numbers += 1
        number = self._adapter_numbers
        # vLLM keys its prefix cache by this name: one for each time that files are loaded.
        adapter = LoRARequest(lora_name=f"{name}#{number}", lora_int_id=number, lora_path=path)
        try:
            added = internals.call(self._core, "add_lora", adapter)
        except EngineBroken:
            raise
        except Exception as error:
            cause = internals.root_cause(error)
            raise AdapterError(f"adapter folder {path!r} cannot be loaded: {cause}") from error
        if not added:
            raise AdapterError(f"adapter folder {path!r} cannot be loaded: vLLM refused it")
        self.remove_adapter(name)
        self._adapters[name] = adapter

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; its requests in flight are answered before it is unloaded."""
        adapter = self._adapters.pop(name, None)
        if adapter is not None:
            self._leaving.append(adapter)
            self._unload_unused()

    def _unload_unused(self) -> None:
        # vLLM would read the files of an adapter again that is unloaded too early.
        if not self._leaving:
            return
        requests: list[_Waiting | _Running] = [*self._waiting, *self._suspects]
        requests += self._running.values()
        used = {r.adapter.lora_int_id for r in requests if r.adapter is not None}
        for adapter in self._leaving:
            if adapter.lora_int_id not in used:
                self._live.forget_adapter(adapter.lora_name)
                self._end_live()
                with internals.fatal():
                    internals.call(self._core, "remove_lora", adapter.lora_int_id)
        self._leaving = [adapter for adapter in self._leaving if adapter.lora_int_id in used]

    def cache_prefix(self, tokens: Tokens) -> None:
        outcome = self._answer_one(Request(b"lmpool-prefix", tokens))
        if outcome.error is not None:
            raise outcome.error

    def clear_cache(self) -> None:
        """Drop every state kept, as soon as what runs has ended; nothing joins before."""
        self._clearing = True
        self._feed()

    def _drop_caches(self) -> None:
        self._live.shrink(0)
        self._end_live()
        with internals.fatal():
            if not internals.call(self._core, "reset_prefix_cache"):
                raise EngineBroken("vLLM kept its prefix cache although nothing runs")
        self._clearing = False

    def tokenizer_files(self) -> Mapping[str, bytes]:
        return tokenizer_files(self._folder)

    def byte_vocabulary(self) -> list[bytes] | None:
        from lmpool.backends.hf.model import load_tokenizer

        return served_byte_vocabulary(load_tokenizer(self._folder, trust_remote_code=False))

    @property
    def underlying_model(self) -> Any:
        """The torch module, for those who know what they do. Raises `EngineBroken` without one."""
        if self._engine is None or not hasattr(self._engine, "model_executor"):
            raise EngineBroken("the model is in another process, or the engine was closed")
        return internals.model(self._engine)

    def close(self) -> None:
        """End vLLM, and free what it holds."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self._core = None
        self._rows.close()
        internals.shut_down(engine)


def _arguments(
    folder: str,
    *,
    dtype: str,
    max_prompt_tokens: int | None,
    trust_remote_code: bool,
    given: Mapping[str, Any],
) -> EngineArgs:
    longest = max_prompt_tokens
    if longest is not None and (type(longest) is not int or longest < 1):
        raise SettingsError(f"max_prompt_tokens={longest!r}: a positive integer expected")
    options = {"enable_prefix_caching": True, **given}
    if current_platform.is_cpu() and not _MEMORY & given.keys():
        # vLLM would want nearly all of the machine's memory, and not start where others use some.
        options["kv_cache_memory_bytes"] = default_kv_cache_bytes(torch.device("cpu"))
    try:
        if options.get("enable_lora"):
            # What is loaded stays loaded: vLLM would read a file again that may be another by then.
            options["max_cpu_loras"] = max(MOST_ADAPTERS, options.get("max_loras", 1))
        return EngineArgs(
            model=folder,
            dtype=dtype,
            max_model_len=None if longest is None else longest + 1,
            trust_remote_code=trust_remote_code,
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_logprobs=-1,
            disable_log_stats=True,
            logits_processors=capture_processors(),
            worker_extension_cls=CAPTURED_ROWS,
            **options,
        )
    except Exception as error:
        raise SettingsError(f"engine_opts: {internals.root_cause(error)}") from error


def _params(max_tokens: int, temperature: float, **options: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=True,
        detokenize=False,
        skip_clone=True,
        **options,
    )


def _with_special_tokens(info: EngineInfo, probe: Outcome, config: Any) -> EngineInfo:
    """The same with what the first row tells, and the special tokens of the model's files."""
    assert probe.row is not None
    sources = (config.try_get_generation_config(), config.hf_text_config.to_dict())

    def first(name: str) -> tuple[int, ...]:
        for source in sources:
            value = source.get(name)
            found = value if isinstance(value, list | tuple) else [value]
            ids = [
                token for token in found if isinstance(token, int) and 0 <= token < info.vocab_size
            ]
            if ids:
                return tuple(dict.fromkeys(ids))
        return ()

    bos, pad = first("bos_token_id"), first("pad_token_id")
    return replace(
        info,
        vocab_size=probe.row.size,
        encoding="bf16" if probe.row.dtype == np.uint16 else "f32",
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=first("eos_token_id"),
        pad_token_id=pad[0] if pad else None,
    )


def _is_unsound(row: Row | None) -> bool:
    return row is not None and not np.isfinite(row[1])


def _outcome(running: _Running, row: Row | None) -> Outcome:
    """What became of a request that vLLM brought to its end."""
    request = running.request
    if row is not None and _is_unsound(row):
        reason = f"the model's logits are not finite in this dtype ({row[1]})"
        return Outcome(request.id, error=PromptFailed(reason))
    if request.sampling is not None:
        drawn = running.drawn
        if drawn and drawn[-1] in request.sampling.eos_token_ids:
            drawn = drawn[:-1]
        return Outcome(request.id, tokens=np.array(drawn, np.uint32))
    if row is None:
        return Outcome(request.id, error=PromptFailed("vLLM gave no row for this prompt"))
    values, scale = row
    return Outcome(request.id, row=values, logsumexp=scale if values.dtype == np.uint16 else 0.0)

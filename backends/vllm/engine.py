"""vLLM as an engine: prompts join while others run, and every row is captured at the sampler.

Rows come from a logits processor inside vLLM's model runner (`capture`), which copies them in one
piece a step; on a GPU it reduces those of which less is asked, and copies the answers alone. A
prompt whose row was given out stays live in vLLM for a while, so that the one which extends it
costs a decode step (`live`).
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, Final, assert_never

import numpy as np
import numpy.typing as npt
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from lmpool.backends.admission import of_another_head
from lmpool.backends.continuous import Admitted, ContinuousEngine
from lmpool.backends.engine import EngineInfo, Measures, Outcome, Request, Tokens
from lmpool.backends.head_fit import head_or_reason
from lmpool.backends.model_config import special_tokens
from lmpool.backends.model_files import ModelFiles
from lmpool.backends.progress import stage
from lmpool.backends.vllm import internals
from lmpool.backends.vllm.adapters import check_adapter, write_plain
from lmpool.backends.vllm.continuations import drawing_params, go_on, prompt_params
from lmpool.backends.vllm.head import ModelHead
from lmpool.backends.vllm.live import LivePrompt, LivePrompts
from lmpool.backends.vllm.options import NUMERIC, engine_arguments
from lmpool.backends.vllm.rows import (
    FullLogprobs,
    RowSource,
    is_none,
    outcome_of_row,
    reducible,
    row_source,
)
from lmpool.backends.vllm.texts import ScoredTexts, outcome_of
from lmpool.backends.words import top_of
from lmpool.errors import AdapterError, EngineBroken, PromptFailed, SettingsError
from lmpool.tensor_files import ModelTensors
from lmpool.wants import Generate, HeadPart, Hidden, OfRow, Row, Score, Top, TopLogprobs

WAIT_SECONDS: Final = 0.02
"""How long a step waits for an engine in another process before new requests may join."""

STARVED_SECONDS: Final = 2.0
"""How long nothing may come out of vLLM before live prompts give up what they hold."""

MAX_TEMPERATURE: Final = 2.0
"""vLLM refuses more, and its engine would end with such a request."""


@dataclass(slots=True, eq=False)
class _Inside:
    """What a running request is in vLLM: the number of its row, and what is live of its prompt."""

    number: int
    live: LivePrompt | None
    steps: bool
    """Whether the likeliest tokens of each step are taken."""
    drawn: int = 0
    """Tokens that came out of vLLM."""


class VLLMEngine(ContinuousEngine[LoRARequest]):
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
        **engine_opts: object,
    ) -> None:
        super().__init__()
        for name, value in (("own_process", own_process), ("capture", capture)):
            if not isinstance(value, bool):
                raise SettingsError(f"{name}={value!r}: true or false expected")
        if live_prompts is not None and (type(live_prompts) is not int or live_prompts < 0):
            raise SettingsError(f"live_prompts={live_prompts!r}: 0 or a positive integer expected")
        self._engine: Any = None
        self.model_files = ModelFiles(model, revision, trust_remote_code=trust_remote_code)
        arguments = engine_arguments(
            str(self.model_files.folder),
            dtype=dtype,
            max_prompt_tokens=self.model_files.config.within_longrope(max_prompt_tokens, "vLLM"),
            trust_remote_code=trust_remote_code,
            given=engine_opts,
        )
        stage("weights")
        try:
            self._engine = internals.make_engine(arguments, own_process=own_process)
        except SettingsError:
            raise
        except Exception as error:
            raise SettingsError(
                f"vLLM cannot serve {model!r}: {internals.root_cause(error)}"
            ) from error
        stage("trial")
        self._core: Any = self._engine.engine_core
        self._last_output = 0.0
        self._numbers = 0
        self._inside: dict[str, _Inside] = {}
        self._take_limits(bool(engine_opts.get("enable_lora")), live_prompts)
        self._rows: RowSource = FullLogprobs()
        self._head: ModelHead | None = None
        try:
            self._rows = row_source(self._engine, capture=capture)
            self._texts = ScoredTexts(self._engine, self._rows.prefix)
            self.info = self._describe(model, revision, engine_opts)
            name = self._engine.vllm_config.model_config.architecture
            self._head, reason = head_or_reason(name, self._find_head, (EngineBroken,))
            self.clear_cache()
            head = None if self._head is None else self._head.form
            self.info = replace(self.info, head=head, no_head=reason)
        except BaseException:
            self.close()
            raise

    def _take_limits(self, lora: bool, live_prompts: int | None) -> None:
        """Heed what vLLM has room for."""
        config = self._engine.vllm_config
        self._lora = lora
        self._on_cpu = current_platform.is_cpu()
        self._shares_prefixes = bool(config.cache_config.enable_prefix_caching)
        # On a CPU NumPy reduces rows as fast, and nothing is copied either.
        self._reduces = not self._on_cpu
        self._most_adapters = int(config.lora_config.max_cpu_loras) if lora else 0
        self._adapter_numbers = 0
        self._tensors: ModelTensors | None = None
        self._plain: tempfile.TemporaryDirectory[str] | None = None
        self._most_running = int(config.scheduler_config.max_num_seqs)
        self._live = LivePrompts(
            self._most_running // 2 if live_prompts is None else live_prompts,
            # So that one prompt of any length always finds room.
            internals.kv_tokens(self._engine) - int(config.model_config.max_model_len),
            int(config.cache_config.block_size),
        )

    def _describe(self, model: str, revision: str | None, given: Mapping[str, Any]) -> EngineInfo:
        assert self.model_files is not None
        config = self._engine.vllm_config.model_config
        dtype = str(config.dtype).removeprefix("torch.")
        identity: dict[str, object] = {
            "engine": "vllm",
            "dtype": dtype,
            "files": self.model_files.identity(),
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
        try:
            probe = self.run_to_end(Request(b"probe", np.zeros(1, np.uint32)))
        except EngineBroken as error:
            raise SettingsError(
                f"vLLM cannot serve {model!r}: its first prompt: {error}"
            ) from error
        self.clear_cache()
        if probe.row is None:
            raise SettingsError(f"vLLM cannot serve {model!r}: its first prompt: {probe.error}")
        # What a config says of its model may differ from the head (padded vocabularies).
        vocab_size = probe.row.size
        sources = (config.try_get_generation_config().get, config.hf_text_config.to_dict().get)
        special = special_tokens(sources, vocab_size)
        return replace(
            info,
            vocab_size=vocab_size,
            encoding="bf16" if probe.row.dtype == np.uint16 else "f32",
            bos_token_id=special.bos,
            eos_token_ids=special.eos,
            pad_token_id=special.pad,
        )

    def _find_head(self) -> ModelHead:
        self._head = found = ModelHead(self._engine, self._rows.prefix)
        self.info = replace(self.info, head=found.form)  # believed, until it was tried
        found.fit(self.run_to_end, self.info)
        return found

    # --- requests ------------------------------------------------------------------------------

    def reason_to_refuse(self, request: Request) -> str | None:
        reason = super().reason_to_refuse(request)
        want = request.want
        if reason is None and isinstance(want, Generate) and want.temperature > MAX_TEMPERATURE:
            reason = (
                f"temperature={want.temperature!r}: a number from 0 to {MAX_TEMPERATURE:g} "
                "expected, which is what vLLM samples with"
            )
        if reason is None and isinstance(want, Hidden) and request.adapter is not None:
            adapter = self.adapters[request.adapter].lora_name
            reason = of_another_head(request.adapter) if adapter in self._texts.unfit else None
        return reason

    def next_to_join(self) -> Iterator[Admitted[LoRARequest]]:
        """As any, but for texts that begin like one that is being scored: they wait for it."""
        held: list[Admitted[LoRARequest]] = []
        for admitted in self._joining():
            name = None if admitted.adapter is None else admitted.adapter.lora_name
            if not admitted.alone and self._texts.waits(admitted.request, name):
                held.append(admitted)
            else:
                yield admitted  # and it is begun before the next one is looked at
        self.waiting.extendleft(reversed(held))

    def _joining(self) -> Iterable[Admitted[LoRARequest]]:
        """As any, but for a CPU with adapters.

        vLLM's LoRA kernels for CPUs give base prompts the last slot's adapter when all slots are
        taken. So there base prompts and the others take turns, and a turn takes nobody in once the
        others wait.
        """
        first = next(iter(self.running.values()), self.waiting[0])
        if not (self._lora and self._on_cpu) or first.alone or self.waiting[0].alone:
            return super().next_to_join()
        alike = [(w.adapter is None) == (first.adapter is None) for w in self.waiting]
        if self.running and not all(alike):
            return ()
        joining = list(compress(self.waiting, alike))
        self.waiting = deque(w for w, like in zip(self.waiting, alike, strict=True) if not like)
        return joining

    @property
    def shares_up_to(self) -> int:
        return self.info.max_prompt_tokens if self._shares_prefixes else 0

    def scores(self, adapter: LoRARequest | None) -> bool:
        return self._texts.possible and not (adapter and adapter.lora_name in self._texts.unfit)

    def begin(self, admitted: Admitted[LoRARequest]) -> str:
        request = admitted.request
        new, live, steps = request.tokens, None, False
        self._numbers += 1
        match request.want:
            case Row() | OfRow():
                small = self._reduces and reducible(request.want, self.info.vocab_size)
                asked = self._rows.row(self._numbers, request.want if small else None)
                params = prompt_params(**asked)
                live, new = self._live_prompt(admitted)
            case Generate():
                assert admitted.continuation is not None
                new = admitted.continuation.next_request().tokens
                top = Top(admitted.continuation.sampler.top_logprobs)
                steps = self._gives_steps(top)
                watched = self._rows.watch(self._numbers, top if steps else None)
                params = drawing_params(
                    admitted.continuation,
                    self.info.vocab_size,
                    watched,
                    rows=top.k > 0 and not steps,
                )
            case Score():
                adapter = None if admitted.adapter is None else admitted.adapter.lora_name
                asked = self._texts.params(self._numbers, request, adapter, admitted.alone)
                params = prompt_params(**asked)
                new = request.tokens[:-1]
            case Hidden():
                assert self._head is not None
                params = prompt_params(**self._head.params(self._numbers, request))
            case HeadPart():
                raise AssertionError("it never joins")
            case _:
                assert_never(request.want)
        name = f"once-{self._numbers}" if live is None else live.id
        self._live.shrink(self._most_running - len(self.running) - 1)
        self._end_live()
        if not self.running:
            self._last_output = time.monotonic()
        with internals.fatal(self._core):
            self._core.add_request(
                internals.make_request(
                    name,
                    new.tolist(),
                    params,
                    arrival=time.time(),
                    lora=admitted.adapter,
                    resumable=live is not None,
                )
            )
        self._inside[name] = _Inside(self._numbers, live, steps)
        return name

    def _gives_steps(self, top: Top) -> bool:
        """Whether the likeliest tokens of each step can be taken beside what vLLM puts out."""
        return top.k > 0 and self._rows.prefix is not None and reducible(top, self.info.vocab_size)

    def _live_prompt(self, admitted: Admitted[LoRARequest]) -> tuple[LivePrompt | None, Tokens]:
        """What a prompt extends, or is live as, if anything; and the tokens to compute."""
        tokens = admitted.request.tokens
        # By the name that no other loading of an adapter has.
        kept_for = None if admitted.adapter is None else admitted.adapter.lora_name
        live = self._live.extended_by(kept_for, tokens)
        if live is not None:
            return live, tokens[live.computed :]
        return self._live.begin(kept_for, tokens), tokens

    def advance(self) -> list[Outcome]:
        with internals.fatal(self._core):
            outputs = internals.step(self._core, WAIT_SECONDS)
        now = time.monotonic()
        if outputs:
            self._last_output = now
        elif now - self._last_output > STARVED_SECONDS:
            # A long prefill, or a cache divided in ways that its size does not tell: to end what is
            # idle costs little, and a prompt that waits for room without end much.
            self._live.shrink(0)
        finished: list[tuple[str, str]] = []
        stopped: list[str] = []
        likeliest = self._likeliest(outputs)
        for output in outputs:
            name = output.request_id
            inside = self._inside.get(name)
            if inside is None:
                continue
            self._rows.see(inside.number, output)
            continuation = self.running[name].continuation
            dropped = inside.steps and name not in likeliest
            if continuation is not None and not dropped:
                go_on(continuation, output, likeliest.get(name))
            if dropped:
                finished.append((name, "what its steps left was dropped"))
            elif output.finish_reason is not None:
                finished.append((name, str(output.finish_reason)))
            elif continuation is not None and continuation.finished:
                finished.append((name, "stop"))
            else:
                continue
            if output.finish_reason is None:
                stopped.append(name)
        outcomes = self._finish(finished) if finished else []
        if stopped:
            with internals.fatal(self._core):
                self._core.abort_requests(stopped)
        self._end_live()
        return outcomes

    def _likeliest(self, outputs: Sequence[Any]) -> dict[str, list[TopLogprobs]]:
        """Those of each token that was put out, of the requests that take them at each step."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        for output in outputs:
            inside = self._inside.get(output.request_id)
            if inside is not None and inside.steps:
                first, inside.drawn = inside.drawn, inside.drawn + len(output.new_token_ids)
                wanted[output.request_id] = [(inside.number, n) for n in range(first, inside.drawn)]
        if not wanted:
            return {}
        with internals.fatal(self._core):
            found = self._rows.take_steps(list(chain.from_iterable(wanted.values())))
        return {
            name: [top_of(found[step][0].copy()) for step in steps]
            for name, steps in wanted.items()
            if found.keys() >= set(steps)
        }

    def _finish(self, finished: Sequence[tuple[str, str]]) -> list[Outcome]:
        """The outcomes of requests, and for what reasons vLLM ended them."""
        with internals.fatal(self._core):
            numbers = [self._inside[name].number for name, _ in finished]
            rows, scored = self._rows.take(numbers), self._texts.take(numbers)
        outcomes = []
        for name, reason in finished:
            admitted, inside = self.ended(name), self._inside.pop(name)
            assert admitted is not None
            given_up = reason not in ("stop", "length")
            if inside.live is not None:
                if given_up:
                    self._live.forget(inside.live)
                else:
                    self._live.keep(inside.live)
            row, text = rows.get(inside.number), scored.get(inside.number)
            if given_up:
                error = PromptFailed(f"vLLM gave this prompt up ({reason})")
                outcomes.append(Outcome(admitted.request.id, error=error))
            elif (is_none(row) or (text is not None and text.is_unsound)) and not admitted.alone:
                # vLLM's attention for CPUs lets NaN of one prompt into others of its step, and from
                # there it is cached. So nothing but what is not finite alone is a prompt's fault.
                self.retry_alone(admitted)
            elif isinstance(admitted.request.want, Score):
                outcomes.append(outcome_of(admitted.request, text))
            else:
                outcomes.append(outcome_of_row(admitted, row))
        return outcomes

    def abort(self, names: Sequence[str]) -> None:
        aborted = [self._inside.pop(name) for name in names]
        for inside in aborted:
            if inside.live is not None:
                self._live.forget(inside.live)
        with internals.fatal(self._core):
            self._core.abort_requests(list(names))
            for source in (self._rows, self._texts):
                source.forget([inside.number for inside in aborted])

    def _end_live(self) -> None:
        ended = self._live.take_ended()
        if ended:
            with internals.fatal(self._core):
                self._core.abort_requests(ended)

    # --- kept state and adapters ---------------------------------------------------------------

    def drop_state(self) -> None:
        self._texts.clear()
        self._live.shrink(0)
        self._end_live()
        with internals.fatal(self._core):
            if not internals.call(self._core, "reset_prefix_cache"):
                raise EngineBroken("vLLM kept its prefix cache although nothing runs")

    def load_adapter(self, name: str, path: str) -> LoRARequest:
        assert self.model_files is not None
        if not self._lora:
            raise AdapterError(
                f"adapter {name!r}: this worker's vLLM takes none; start it with engine_opts "
                '{"enable_lora": true, "max_loras": 4, "max_lora_rank": 64}'
            )
        if self._tensors is None:
            self._tensors = ModelTensors(self.model_files.folder)
        lora = check_adapter(Path(path).resolve(), self._tensors)
        while len(self.adapters) + len(self.leaving) >= self._most_adapters:
            if not self.leaving:
                raise AdapterError(
                    f"adapter {name!r}: {len(self.adapters)} are loaded, as many as this engine "
                    "keeps; remove one"
                )
            self.work()  # what uses a removed one is answered first
        self._adapter_numbers += 1
        number = self._adapter_numbers
        # vLLM keys its prefix cache by this name: one for each time that files are loaded.
        if self._plain is None:
            self._plain = tempfile.TemporaryDirectory(prefix="lmpool-adapters-")
        plain = Path(self._plain.name, str(number))
        adapter = LoRARequest(
            lora_name=f"{name}#{number}", lora_int_id=number, lora_path=str(plain)
        )
        try:
            write_plain(lora, plain)
            added = internals.call(self._core, "add_lora", adapter)
        except EngineBroken:
            raise
        except Exception as error:
            cause = internals.root_cause(error)
            raise AdapterError(f"adapter folder {path!r} cannot be loaded: {cause}") from error
        if not added:
            raise AdapterError(f"adapter folder {path!r} cannot be loaded: vLLM refused it")
        self._texts.heed(adapter.lora_name, lora.pairs)
        return adapter

    def unload_adapter(self, adapter: LoRARequest) -> None:
        # Not before: vLLM would read the files of one again that is unloaded too early.
        self._live.forget_adapter(adapter.lora_name)
        self._texts.unfit.discard(adapter.lora_name)
        self._end_live()
        with internals.fatal(self._core):
            internals.call(self._core, "remove_lora", adapter.lora_int_id)

    # --- the head ------------------------------------------------------------------------------

    def head_weights(self, rows: slice) -> npt.NDArray[Any]:
        return self._open_head().weights(rows)

    def head_bias(self) -> npt.NDArray[np.float32]:
        return self._open_head().bias()

    def _open_head(self) -> ModelHead:
        if self._engine is None:
            raise EngineBroken("the engine was closed")
        assert self._head is not None
        return self._head

    # --- its life ------------------------------------------------------------------------------

    @property
    def underlying_model(self) -> Any:
        """The torch module, for those who know what they do. Raises `EngineBroken` without one."""
        if self._engine is None or not hasattr(self._engine, "model_executor"):
            raise EngineBroken("the model is in another process, or the engine was closed")
        return internals.model(self._engine)

    def measures(self) -> Measures:
        """Tokens that vLLM scheduled, and those in full blocks of its cache.

        None of them where vLLM's engine is in a process of its own.
        """
        return Measures() if self._engine is None else internals.measures(self._engine)

    def close(self) -> None:
        """End vLLM, and free what it holds."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        plain, self._plain = self._plain, None
        if plain is not None:
            plain.cleanup()
        self._core = self._head = None
        self._rows.close()
        internals.shut_down(engine)

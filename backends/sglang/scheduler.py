"""SGLang's scheduler, run in this process and on this thread: all that touches its internals.

The rows never leave the process that computes them. Through SGLang's own engine, which is another
process, each row of 128,256 tokens is pickled twice: a seventh of the rows per second.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import itertools
import json
import sys
import traceback
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.device import HostCopies
from lmpool.backends.engine import Measures, Tokens
from lmpool.backends.head_fit import NoHead
from lmpool.backends.model_config import ModelConfig
from lmpool.backends.options import check_types
from lmpool.backends.sglang.arguments import (
    OWN,
    check_bounds,
    check_version,
    engine_arguments,
    joined,
)
from lmpool.backends.sglang.cpu import prepare
from lmpool.backends.sglang.faithful import check, check_latent
from lmpool.backends.sglang.hidden import HeadTrial, ModelHead
from lmpool.backends.sglang.scorer import Scorer
from lmpool.backends.small_answers import reduce_logits
from lmpool.backends.torch_head import as_numbers
from lmpool.backends.words import Words, alike
from lmpool.checks import chained, why_failed
from lmpool.errors import EngineBroken, SettingsError
from lmpool.wants import Score, TextScores, Want

_IDLE_STEPS: Final = 1_000
"""Steps without a batch, one after another, after which the scheduler is taken for stuck."""

Drawn = tuple[int, bool] | str
"""A token, and whether it is its continuation's last; or why there is none, which fails it."""
Draw = Callable[[Sequence[str], torch.Tensor], Sequence[Drawn]]
"""Draws the next tokens of continuations, by the requests' ids and their logits [ids, vocab]."""
Reduced = tuple[Words, float]
"""An answer's words, and a logsumexp that is not finite where there is none."""


@dataclass(slots=True)
class Step:
    """What one step finished.

    `rows` are ids of requests for a row, `logits` [rows, vocab] those after their prompts, and
    `logsumexp` [rows] theirs in float32; `reduced` is what follows from the rows after prompts, by
    the ids of requests for that; `drawn` are ids of continuations; `scored` is what came of texts
    by id, as `PartialScores.read` has it; `failed` the reasons why requests ended otherwise;
    `states` are ids of requests for a hidden state, `hidden` [states, hidden] those.
    """

    rows: list[str] = field(default_factory=list)
    logits: torch.Tensor | None = None
    logsumexp: torch.Tensor | None = None
    reduced: dict[str, Reduced] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    scored: dict[str, tuple[TextScores | None, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    hidden: torch.Tensor | None = None


@contextlib.contextmanager
def _breaking() -> Iterator[None]:
    """Raise `EngineBroken` for whatever SGLang raises: it may have lost count of what it holds."""
    try:
        yield
    except EngineBroken:
        raise
    except Exception as error:
        raise EngineBroken(f"SGLang failed: {why_failed(error)}") from error


def let_go(error: BaseException | None) -> None:
    """Drop what the frames of an error hold: the half of a model that was loaded until then, whose
    memory the next one may need while somebody still looks at the error."""
    for one in chained(error, hidden=True):
        traceback.clear_frames(one.__traceback__)


class SGLangScheduler:
    """A scheduler of SGLang with one GPU, or the CPU.

    Raises `SettingsError` for another release of SGLang than those of `VERSIONS`, for arguments
    that it refuses, and where this process has one already. Once it runs, all that goes wrong in
    SGLang is `EngineBroken`.
    """

    _open: SGLangScheduler | None = None

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        draw: Draw,
        max_loras: int,
        max_lora_rank: int,
        lora_targets: Sequence[str],
        server_args: Mapping[str, Any],
        overrides: Mapping[str, Any],
    ) -> None:
        check_version()
        if reserved := sorted(OWN & server_args.keys()):
            raise SettingsError(
                f"server_args has {reserved[0]!r}, which is the engine's own affair, or one of its "
                "options"
            )
        if SGLangScheduler._open is not None:
            raise SettingsError("this process has an SGLang engine: close it before the next")
        self.device = "cpu" if prepare() else "cuda"
        self._draw = draw
        self._numbers = itertools.count()
        self._idle = 0
        self._computed_tokens = 0
        self._scheduler: Any = None
        self._runner: Any = None
        self._batch: list[Any] = []
        self._given: dict[str, Any] = {}
        """What its user laid over config.json."""
        self._wants: dict[str, Want] = {}
        """What is reduced of the rows of requests, by their ids."""
        self._aborted: dict[str, str] = {}
        arguments = engine_arguments(folder, self.device, dtype, overrides)
        if max_loras:
            arguments |= {
                "enable_lora": True,
                "max_loras_per_batch": max_loras,
                "max_lora_rank": max_lora_rank,
                "lora_target_modules": list(lora_targets),
            }
        SGLangScheduler._open = self
        try:
            self._start(joined(arguments, server_args))
            self._given = json.loads(server_args.get("json_model_override_args", "{}"))
        except SettingsError:
            self.close()
            raise
        except Exception as error:
            let_go(error)
            self.close()
            raise SettingsError(
                f"SGLang cannot serve {str(folder)!r}: {why_failed(error)}"
            ) from error

    def _start(self, arguments: Mapping[str, Any]) -> None:
        server: Any = importlib.import_module("sglang.srt.server_args")
        network: Any = importlib.import_module("sglang.srt.utils.network")
        context: Any = importlib.import_module("sglang.srt.runtime_context")
        scheduler: Any = importlib.import_module("sglang.srt.managers.scheduler")
        self._io: Any = importlib.import_module("sglang.srt.managers.io_struct")
        self._params: Any = importlib.import_module("sglang.srt.sampling.sampling_params")
        self._ends: Any = importlib.import_module("sglang.srt.managers.schedule_batch")
        unknown = sorted(set(arguments) - set(inspect.signature(server.ServerArgs).parameters))
        if unknown:
            raise SettingsError(f"server_args has {unknown[0]!r}, which SGLang does not know")
        check_types("server_args", arguments, server.ServerArgs)
        check_bounds(arguments)
        settings = server.ServerArgs(**arguments)
        check_latent(settings)
        context.publish(
            settings,
            role="scheduler",
            ranks=context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0),
        )
        # It would hold the scheduler for ever, and send SIGQUIT to the parent of this process.
        scheduler.create_scheduler_watchdog = lambda *_, **__: None
        # It would leave a file in shared memory for each scheduler.
        scheduler.create_load_snapshot_writer = lambda *_, **__: None
        # Nobody talks to it. Its sockets would be garbage with their context, whose collector may
        # then wait for them for ever; their names would stay as files.
        channels, hook = scheduler.SchedulerIpcChannels, sys.excepthook
        scheduler.SchedulerIpcChannels = SimpleNamespace(create=self._channels)
        try:
            ports = SimpleNamespace(nccl_port=network.get_free_port_below_ephemeral())
            self._scheduler = scheduler.Scheduler(settings, ports)
        finally:
            scheduler.SchedulerIpcChannels = channels
            sys.excepthook = hook  # torch.distributed wraps it once more for each scheduler
        if self.device == "cpu":
            self._scheduler.schedule_stream.synchronize = lambda: None
            self._scheduler._war_barrier_enabled = False
        self._runner = self._scheduler.tp_worker.model_runner
        self._runner.sample = self._sample
        self._copies = HostCopies(torch.device(self._runner.device))
        self._scorer = Scorer(self._runner, self.vocab_size, lambda: self._batch)

    def _channels(self, **_: object) -> SimpleNamespace:
        """SGLang's channels to other processes, which are none."""
        nobody = SimpleNamespace(send_output=lambda *_: None, closed=True)
        return SimpleNamespace(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=SimpleNamespace(send_output=self._hear),
            send_to_detokenizer=nobody,
            send_metrics_from_scheduler=nobody,
        )

    def _hear(self, output: Any, request: object = None) -> None:
        """Note which request SGLang ends outside of a batch, for want of memory or time."""
        if isinstance(output, self._io.AbortReq):
            reason = (output.finished_reason or {}).get("message")
            self._aborted[output.rid] = str(reason or "SGLang aborted it")

    # --- what it is ----------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """The length of a row."""
        return int(self._scheduler.model_config.vocab_size)

    @property
    def architecture(self) -> str:
        """The name of the model's class."""
        return type(self._runner.model).__name__

    @property
    def windows(self) -> dict[int, int]:
        """How many tokens those layers see, itself included, that do not see all, by number."""
        attention: Any = importlib.import_module("sglang.srt.layers.radix_attention")
        kind = attention.RadixAttention
        layers = [m for m in self._runner.model.modules() if isinstance(m, kind)]
        sizes = {m.layer_id: m.sliding_window_size for m in layers}
        return {layer: size + 1 for layer, size in sizes.items() if size > -1}

    @property
    def scales_rotary(self) -> bool:
        """Whether tokens are placed otherwise than by plain rotary positions, as far as known."""
        rotary: Any = importlib.import_module("sglang.srt.layers.rotary_embedding")
        plain = rotary.RotaryEmbedding
        found = {type(m) for m in self._runner.model.modules() if isinstance(m, plain)}
        return found != {plain}

    def check_faithful(self, config: ModelConfig) -> None:
        """Raise `SettingsError` where the model is not computed as transformers has it."""
        given = self._given.get("text_config", {})
        given = given if isinstance(given, dict) else {}
        said = {**config.config, **self._given, **given}
        # SGLang lays these over what is there, whichever of the two names it has.
        names = ("rope_scaling", "rope_parameters")
        theirs = next((self._given[name] for name in names if self._given.get(name)), None)
        before: Any = next((config.config[name] for name in names if config.config.get(name)), {})
        if isinstance(theirs, dict) and isinstance(before, dict) and not given:
            said |= {"rope_parameters": {**before, **theirs}, "rope_scaling": None}
        text = self._scheduler.model_config.hf_text_config
        check(self._runner.model, text, said)

    @property
    def longest_prompt(self) -> int:
        """The longest prompt that it takes: a few tokens less than the model does."""
        return int(self._scheduler.max_req_input_len) - 1

    @property
    def dtype(self) -> str:
        """What the model computes in."""
        return str(self._scheduler.model_config.dtype).removeprefix("torch.")

    # --- requests ------------------------------------------------------------------------------

    @_breaking()
    def add(
        self,
        tokens: Tokens,
        *,
        lora_id: str | None = None,
        max_tokens: int = 0,
        score: Score | None = None,
        hidden: bool = False,
        reduce: Want | None = None,
    ) -> str:
        """Take a prompt in, and return its id.

        It is for a row, or with `reduce` for what follows from it; with `max_tokens` for a
        continuation; with `score` a text to be scored; with `hidden` for a hidden state.
        """
        request = f"{next(self._numbers):016x}"
        if reduce is not None:
            self._wants[request] = reduce
        prompt = tokens
        if score is not None:
            prompt = tokens[:-1]
            self._scorer.begin(request, score, tokens[score.start :])
        # SGLang's own stop tokens would always count the model's among them.
        params = self._params.SamplingParams(max_new_tokens=max_tokens, ignore_eos=True)
        params.normalize(None)
        self._scheduler.process_input_requests(
            [
                self._io.TokenizedGenerateReqInput(
                    rid=request,
                    input_text="",
                    input_ids=array("q", prompt.tolist()),
                    input_embeds=None,
                    mm_inputs=None,
                    token_type_ids=None,
                    sampling_params=params,
                    return_logprob=score is not None,
                    logprob_start_len=-1 if score is None else score.start - 1,
                    top_logprobs_num=0,
                    token_ids_logprob=None,
                    return_hidden_states="last" if hidden else False,
                    stream=False,
                    lora_id=lora_id,
                )
            ]
        )
        return request

    @_breaking()
    def step(self) -> Step:
        """Run one batch. To be called while there are requests."""
        scheduler, finished = self._scheduler, Step(failed=self._aborted)
        self._aborted = {}
        for name in finished.failed:
            self._forget_wants(name)
        with torch.inference_mode():
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch = plan.running_batch
            batch = scheduler.last_batch = plan.batch_to_run
            if batch is None:
                self._idle += 1
                if self._idle > _IDLE_STEPS:
                    raise EngineBroken("SGLang's scheduler runs none of the prompts that it has")
                return finished
            self._idle = 0
            self._batch = list(batch.reqs)
            self._computed_tokens += batch.extend_num_tokens or len(self._batch)
            result = scheduler.run_batch(batch)
            logits = self._logits(result.logits_output)
            hidden = result.logits_output.hidden_states
            result.logits_output.hidden_states = None  # SGLang would make lists of it
            logsumexp = torch.logsumexp(logits.float(), dim=-1)
            for place in (~torch.isfinite(logsumexp)).nonzero().flatten().tolist():
                self._forget(self._batch[place])
            scheduler.process_batch_result(batch, result)
            places, hidden_places = [], []
            small: dict[Hashable, list[tuple[int, str, Want]]] = {}
            for place, request in enumerate(self._batch):
                reason = request.finished_reason
                if reason is None:
                    continue
                if isinstance(reason, self._ends.FINISH_ABORT):
                    finished.failed[request.rid] = str(reason.message)
                elif request.rid in self._scorer:
                    finished.scored[request.rid] = self._scorer.take(request.rid)
                elif request.return_hidden_states:
                    finished.states.append(request.rid)
                    hidden_places.append(place)
                elif request.rid in self._wants:
                    want = self._wants.pop(request.rid)
                    small.setdefault(alike(want), []).append((place, request.rid, want))
                elif request.sampling_params.max_new_tokens == 0:
                    finished.rows.append(request.rid)
                    places.append(place)
                else:
                    finished.drawn.append(request.rid)
            if places:
                # Copies: the next batch may write where this one did.
                chosen = torch.tensor(places, device=logits.device)
                finished.logits, finished.logsumexp = logits[chosen], logsumexp[chosen]
            if hidden_places and hidden is not None:
                finished.hidden = hidden[torch.tensor(hidden_places, device=hidden.device)]
            for same in small.values():
                finished.reduced |= self._reduce(logits, same)
            self._batch = []
        for name in finished.failed:
            self._forget_wants(name)
        return finished

    def _reduce(
        self, logits: torch.Tensor, same: Sequence[tuple[int, str, Want]]
    ) -> dict[str, Reduced]:
        """What follows from rows of the batch's logits, of wants that are alike."""
        places = torch.tensor([place for place, _, _ in same], device=logits.device)
        copied = self._copies.start(*reduce_logits(logits, places, [want for _, _, want in same]))
        words, scales = (tensor.numpy() for tensor in copied())
        words.flags.writeable = False
        found = zip(words, scales.tolist(), strict=True)
        return dict(zip((name for _, name, _ in same), found, strict=True))

    def _forget_wants(self, name: str) -> None:
        self._wants.pop(name, None)
        self._scorer.forget(name)

    def _logits(self, logits_output: Any) -> torch.Tensor:
        """The logits after each request of the batch [requests, vocab]."""
        logits: torch.Tensor = logits_output.next_token_logits
        return logits[:, : self.vocab_size]

    def _sample(self, logits_output: Any, forward_batch: Any) -> torch.Tensor:
        """The next token of each request of the batch, in place of SGLang's `ModelRunner.sample`.

        Raw logits stay as they are, for the rows.
        """
        logits = self._logits(logits_output)
        # Of a prompt whose beginning was computed, the logits are not wanted.
        places = [
            place
            for place, request in enumerate(self._batch)
            if request.sampling_params.max_new_tokens > 0 and request.inflight_middle_chunks <= 0
        ]
        chosen = torch.tensor(places, dtype=torch.int64, device=logits.device)
        drawn = [0] * len(self._batch)
        if not places:
            return torch.tensor(drawn, dtype=torch.int64, device=logits.device)
        names = [self._batch[place].rid for place in places]
        for place, each in zip(places, self._draw(names, logits[chosen]), strict=True):
            request = self._batch[place]
            if isinstance(each, str):
                request.to_finish = self._ends.FINISH_ABORT(each)
                continue
            drawn[place], ends = each
            if ends and request.to_finish is None:
                request.to_finish = self._ends.FINISH_MATCHED_TOKEN(matched=drawn[place])
        return torch.tensor(drawn, dtype=torch.int64, device=logits.device)

    def _forget(self, request: Any) -> None:
        """Keep a request whose logits overflow from spoiling others by its keys and values.

        Attention gives what it does not look at the weight 0, and 0 * NaN is NaN: a token that
        overflows spoils those before it too, and whoever gets its slots may be next.
        """
        request.skip_radix_cache_insert = True
        if request.inflight_middle_chunks > 0:
            return  # its last piece will overflow too, as long as this one is there
        own = slice(request.kv.cache_protected_len, request.kv.kv_allocated_len)
        slots = self._scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx, own].long()
        pool = self._scheduler.token_to_kv_pool_allocator.get_kvcache()
        for kind in ("k_buffer", "v_buffer", "kv_buffer"):
            for layer in getattr(pool, kind, None) or ():
                layer[slots] = 0

    def find_head(self, prompts: Iterable[Tokens], config: Mapping[str, Any]) -> ModelHead:
        """The head of the model, by these prompts and the model's `config`. Nothing runs.

        Raises `NoHead` where it has none that others may apply.
        """
        trial = HeadTrial(self._runner.model.logits_processor, self.vocab_size, config)
        return trial.run(prompts, self._state_of)

    def _state_of(self, prompt: Tokens) -> npt.NDArray[np.float32]:
        self.add(prompt, hidden=True)
        while True:
            done = self.step()
            if done.failed:
                raise NoHead(f"its first prompts: {', '.join(done.failed.values())}")
            if done.states:
                if done.hidden is None:
                    raise NoHead("SGLang gives none")
                return as_numbers(done.hidden[0])

    def busy(self) -> bool:
        """Whether there is a request that has not ended, cancelled ones among them."""
        return not self._scheduler.is_fully_idle()

    @_breaking()
    def abort(self, request: str) -> None:
        """End a request; one that is running ends with the next step."""
        self._forget_wants(request)
        self._scheduler.abort_request(self._io.AbortReq(rid=request, abort_all=False))

    def measures(self) -> Measures:
        """Tokens that went through the model, and those of the radix cache."""
        tree = self._scheduler.tree_cache
        kept = int(tree.evictable_size() + tree.protected_size())
        return Measures(self._computed_tokens, kept, int(self._scheduler.max_total_num_tokens))

    @_breaking()
    def flush(self) -> None:
        """Drop the radix cache, while there are no requests."""
        if not self._scheduler.flush_cache():
            raise EngineBroken("SGLang kept its cache although nothing runs")
        self._idle = 0

    # --- adapters ------------------------------------------------------------------------------

    @_breaking()
    def load_lora(
        self, lora_id: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]
    ) -> str:
        """Load an adapter under an id that was never used; what is wrong with it, or ''."""
        reference = self._io.LoadLoRAAdapterReqInput(
            lora_name=lora_id, lora_path=lora_id, lora_id=lora_id
        ).to_ref()
        result = self._runner.load_lora_adapter_from_tensors(reference, tensors, config, None)
        return "" if result.success else str(result.error_message)

    @_breaking()
    def unload_lora(self, lora_id: str) -> None:
        """Unload an adapter that no request asks for."""
        result = self._scheduler.unload_lora_adapter(
            self._io.UnloadLoRAAdapterReqInput(lora_name=lora_id, lora_id=lora_id)
        )
        if not result.success:
            raise EngineBroken(f"SGLang does not unload an adapter: {result.error_message}")

    @_breaking()
    def loras_in_use(self) -> set[str]:
        """The adapters that requests ask for, cancelled ones among them."""
        scheduler = self._scheduler
        requests = [*scheduler.collect_inflight_reqs(), *scheduler.waiting_queue]
        if scheduler.chunked_req is not None:
            requests.append(scheduler.chunked_req)
        return {request.lora_id for request in requests if request.lora_id is not None}

    # --- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model and the process's place for another one."""
        if SGLangScheduler._open is not self:
            return
        try:
            if self._scheduler is not None:
                self._scheduler.release_host_resources()
            self._scheduler = self._runner = None
            self._batch = []
            self._wants = {}
            parallel: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
            with contextlib.suppress(AssertionError):
                parallel.destroy_model_parallel()
            with contextlib.suppress(AssertionError):
                parallel.destroy_distributed_environment()
            # It holds where a model has its experts, and takes no other's beside.
            context: Any = importlib.import_module("sglang.srt.runtime_context")
            context.reset_context()
            gc.collect()
            if self.device != "cpu":
                torch.cuda.empty_cache()
        finally:
            SGLangScheduler._open = None

"""SGLang as an engine, fed while it runs: its radix cache, its batching, its adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, assert_never

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.admission import of_another_head
from lmpool.backends.continuous import Admitted, ContinuousEngine
from lmpool.backends.device import HostCopies
from lmpool.backends.engine import EngineInfo, Measures, Outcome, Request
from lmpool.backends.head_fit import head_or_reason, probes
from lmpool.backends.model_files import ModelFiles
from lmpool.backends.options import check_dtype, check_types
from lmpool.backends.progress import stage
from lmpool.backends.sglang.adapters import AdapterReader
from lmpool.backends.sglang.drawing import draw_by_rows, draw_there
from lmpool.backends.sglang.faithful import told
from lmpool.backends.sglang.hidden import ModelHead
from lmpool.backends.sglang.scheduler import Drawn, SGLangScheduler, Step, let_go
from lmpool.backends.torch_head import as_numbers
from lmpool.backends.words import alike, outcome_of
from lmpool.errors import AdapterError, EngineBroken, PromptFailed, SettingsError
from lmpool.wants import Generate, HeadPart, Hidden, OfRow, Row, Score, TextScores, Want

LORA_TARGETS: Final = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
"""The layers that adapters change in most models."""


class SGLangEngine(ContinuousEngine[str]):
    """Computes rows with SGLang's scheduler, in this process.

    `model` is ``tiny``, a folder, or a hub id (then with an optional `revision`). `dtype` is
    ``float32``, ``bfloat16``, ``float16``, or ``auto``: float32 on a CPU, the model's own on a
    GPU. `max_prompt_tokens` lowers the bound on prompts, which is a few tokens below the model's,
    or the window of a model whose layers SGLang has see all instead, as Mistral's and Phi-3's.
    Up to `max_loras` adapters are in one batch, and any number is loaded; 0 for none. They have a
    rank of `max_lora_rank` or less and change layers of the names in `lora_targets`. `server_args`
    are SGLang's own, by their names in its `ServerArgs` (``mem_fraction_static``,
    ``chunked_prefill_size``, ``quantization``, ...).

    SGLang batches, keeps prefixes and evicts them. Tokens are drawn as every engine of lmpool draws
    them, from the logits that SGLang computes step by step. A process has one such engine at a
    time. Raises `SettingsError` for a model or an option that cannot be used.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        max_prompt_tokens: int | None = None,
        max_loras: int = 0,
        max_lora_rank: int = 64,
        lora_targets: Sequence[str] = LORA_TARGETS,
        server_args: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        for name, value, least in (
            ("max_loras", max_loras, 0),
            ("max_lora_rank", max_lora_rank, 1),
        ):
            if type(value) is not int or value < least:
                raise SettingsError(f"{name}={value!r}: an integer of {least} or more expected")
        files = ModelFiles(model, revision)
        self.model_files = files
        longest = files.config.longest_prompt(
            files.config.within_longrope(max_prompt_tokens, "SGLang")
        )
        if dtype == "auto" and not torch.cuda.is_available():
            dtype = "float32"
        check_types(
            "engine='sglang'",
            {"server_args": server_args, "lora_targets": lora_targets},
            type(self),
        )
        arguments = dict(server_args or {})
        self._max_loras = max_loras
        self._lora_head = max_loras > 0 and "lm_head" in lora_targets
        self._loaded = 0
        self._of_head: set[str] = set()
        """The adapters that change the head."""
        self._adapter_reader = AdapterReader(files.folder, max_lora_rank)
        stage("weights")
        scheduler = SGLangScheduler(
            files.folder,
            dtype=dtype,
            draw=self._draw,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            lora_targets=lora_targets,
            server_args=arguments,
            overrides=told(files.config),
        )
        stage("trial")
        self._scheduler: SGLangScheduler | None = scheduler
        self._head: ModelHead | None = None
        try:
            longest = self._check_positions(files, scheduler, longest, max_prompt_tokens)
            self._bfloat16 = scheduler.dtype == "bfloat16"
            # Copied off a GPU is what was asked for. On a CPU NumPy is as fast, and copies nothing.
            self._reduce = scheduler.device == "cuda"
            self._copies = HostCopies(torch.device(scheduler.device))
            self.info = self._describe(files, scheduler, model, revision, longest, arguments)
            self._head, reason = self._find_head(files)
            head = None if self._head is None else self._head.form
            self.info = replace(self.info, head=head, no_head=reason)
        except BaseException as error:
            let_go(error)
            self.close()
            raise

    def _check_positions(
        self, files: ModelFiles, scheduler: SGLangScheduler, longest: int, wanted: int | None
    ) -> int:
        """The longest prompt that SGLang computes as the model has it. Raises `SettingsError` where
        there is none."""
        name = f"SGLang's {scheduler.architecture}"
        scaling = files.config.rope_scaling()
        if scaling is not None and not scheduler.scales_rotary:
            raise SettingsError(
                f"{name} does not scale rotary positions, as the model does ({scaling}): rows "
                "would be others; serve it with another engine"
            )
        scheduler.check_faithful(files.config)
        window, seen = files.config.window, scheduler.windows
        kinds = files.config.config.get("layer_types")
        if not isinstance(kinds, list):
            heeded = {*seen.values()} == {window}
        else:
            own = {n: window for n, kind in enumerate(kinds) if kind == "sliding_attention"}
            heeded = seen == own
            if seen.keys() - own.keys():
                raise SettingsError(
                    f"{name} does not have the layers see windows that layer_types={kinds} of "
                    "config.json say: rows would be others; serve it with another engine"
                )
        return longest if heeded else files.config.within_window(longest, wanted, name)

    def _find_head(self, files: ModelFiles) -> tuple[ModelHead | None, str]:
        info, scheduler = self.info, self._open()
        special = (info.bos_token_id, info.pad_token_id, *info.eos_token_ids)
        prompts = probes(info.vocab_size, special, info.max_prompt_tokens)
        config = files.config.config
        name = scheduler.architecture
        fatal = (EngineBroken,)
        found = head_or_reason(name, lambda: scheduler.find_head(prompts, config), fatal)
        self.drop_state()
        return found

    def _describe(
        self,
        files: ModelFiles,
        scheduler: SGLangScheduler,
        model: str,
        revision: str | None,
        longest: int,
        arguments: Mapping[str, Any],
    ) -> EngineInfo:
        special = files.config.special_tokens(scheduler.vocab_size)
        return EngineInfo(
            engine="sglang",
            model=model,
            revision=revision,
            vocab_size=scheduler.vocab_size,
            max_prompt_tokens=min(longest, scheduler.longest_prompt),
            dtype=scheduler.dtype,
            encoding="bf16" if self._bfloat16 else "f32",
            identity={
                "engine": "sglang",
                "dtype": scheduler.dtype,
                "files": files.identity(),
                "server_args": json.dumps(arguments, sort_keys=True, default=str),
            },
            bos_token_id=special.bos,
            eos_token_ids=special.eos,
            pad_token_id=special.pad,
        )

    # --- requests ------------------------------------------------------------------------------

    def begin(self, admitted: Admitted[str]) -> str:
        request, draws, score, hidden = admitted.request, 0, None, False
        tokens, reduce = request.tokens, None
        match request.want:
            case Row():
                pass
            case OfRow():
                reduce = request.want if self._reduces(request.want) else None
            case Generate():
                assert admitted.continuation is not None
                tokens = admitted.continuation.next_request().tokens
                draws = admitted.continuation.left
            case Score():
                score = request.want
            case Hidden():
                hidden = True
            case HeadPart():
                raise AssertionError("it never joins")
            case _:
                assert_never(request.want)
        return self._open().add(
            tokens,
            lora_id=admitted.adapter,
            max_tokens=draws,
            score=score,
            hidden=hidden,
            reduce=reduce,
        )

    def _reduces(self, want: Want) -> bool:
        """Whether what is asked for is reduced where the row is, and no row copied."""
        return self._reduce and alike(want) is not None

    def reason_to_refuse(self, request: Request) -> str | None:
        reason = super().reason_to_refuse(request)
        if reason is None and isinstance(request.want, Hidden) and request.adapter is not None:
            changed = self.adapters[request.adapter] in self._of_head
            reason = of_another_head(request.adapter) if changed else None
        return reason

    @property
    def shares_up_to(self) -> int:
        return self.info.max_prompt_tokens  # SGLang bounds its steps, and its radix cache is on

    def scores(self, adapter: str | None) -> bool:
        # SGLang computes an adapter's part of the head for whole batches alone.
        return not self._lora_head

    def advance(self) -> list[Outcome]:
        done = self._open().step()
        outcomes = self._rows(done) + self._states(done)
        for name, (words, scale) in done.reduced.items():
            ended = self.ended(name)
            if ended is not None:
                outcomes.append(outcome_of(ended.request, words, scale))
        for name in done.drawn:
            ended = self.ended(name)
            if ended is not None and ended.continuation is not None:
                outcomes.append(Outcome(ended.request.id, answer=ended.continuation.answer()))
        for name, (scores, logsumexp) in done.scored.items():
            ended = self.ended(name)
            if ended is not None:
                outcomes.append(_scored(ended.request.id, scores, logsumexp))
        for name, reason in done.failed.items():
            ended = self.ended(name)
            if ended is not None:
                outcomes.append(Outcome(ended.request.id, error=PromptFailed(reason)))
        return outcomes

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._open().abort(name)

    def _rows(self, done: Step) -> list[Outcome]:
        outcomes: list[Outcome] = []
        if done.logits is None or done.logsumexp is None:
            return outcomes
        logits, logsumexp = done.logits, done.logsumexp
        narrow = logits.to(torch.bfloat16)
        block: Any
        # Some models compute more after the head, in float32.
        if self._bfloat16 and torch.allclose(narrow.to(logits), logits, 0, 0, equal_nan=True):
            block = narrow.view(torch.int16).cpu().numpy().view(np.uint16)
        else:
            block = (logits.float() - logsumexp[:, None]).cpu().numpy()
        block.flags.writeable = False
        for name, row, scale in zip(done.rows, block, logsumexp.tolist(), strict=True):
            ended = self.ended(name)
            if ended is not None:
                outcomes.append(Outcome.of_row(ended.request.id, row, scale))
        return outcomes

    def _states(self, done: Step) -> list[Outcome]:
        outcomes: list[Outcome] = []
        if done.hidden is None:
            return outcomes
        states = as_numbers(done.hidden)
        states.flags.writeable = False
        for name, state in zip(done.states, states, strict=True):
            ended = self.ended(name)
            if ended is not None:
                outcomes.append(Outcome.of_state(ended.request.id, state))
        return outcomes

    def _draw(self, names: Sequence[str], logits: torch.Tensor) -> list[Drawn]:
        """The next tokens of continuations, by their logits [names, vocab]."""
        running = [self.running.get(name) for name in names]
        continuations = [None if each is None else each.continuation for each in running]
        if self._reduce:
            return draw_there(continuations, logits, self._copies)
        return draw_by_rows(continuations, logits)

    # --- kept state and adapters ---------------------------------------------------------------

    def drop_state(self) -> None:
        self._drain()
        self._open().flush()

    def _drain(self) -> None:
        """Run what nobody waits for any more: cancelled requests end with the next steps."""
        scheduler = self._open()
        while scheduler.busy():
            scheduler.step()

    def load_adapter(self, name: str, path: str) -> str:
        """Load a LoRA adapter of PEFT."""
        if not self._max_loras:
            raise AdapterError(
                "this engine was opened without adapters: write engine_opts={'max_loras': 4} for "
                "4 of them in one batch"
            )
        config, tensors = self._adapter_reader.read(Path(path))
        # SGLang keeps an adapter's prefixes under its id, and loads an unloaded one again when it
        # is named: an id that was never used is a new adapter, and a name is known here alone.
        self._loaded += 1
        lora_id = f"lmpool-{self._loaded}"
        wrong = self._open().load_lora(lora_id, config, tensors)
        if wrong:
            raise AdapterError(
                f"SGLang refuses the adapter in {path!r}, which changes "
                f"{', '.join(config['target_modules'])}: name all of them in "
                f"engine_opts={{'lora_targets': [...]}}; {wrong}"
            )
        if "lm_head" in config["target_modules"]:
            self._of_head.add(lora_id)
        return lora_id

    def unload_adapter(self, adapter: str) -> None:
        self._of_head.discard(adapter)
        self._open().unload_lora(adapter)

    def adapters_in_use(self) -> set[str]:
        if not self.running:
            self._drain()
        return super().adapters_in_use() | self._open().loras_in_use()

    # --- the head ------------------------------------------------------------------------------

    def head_weights(self, rows: slice) -> npt.NDArray[Any]:
        self._open()
        assert self._head is not None
        return self._head.matrix.weights(rows)

    # --- its life ------------------------------------------------------------------------------

    def measures(self) -> Measures:
        """Tokens of SGLang's batches, and those in its radix cache."""
        return Measures() if self._scheduler is None else self._scheduler.measures()

    def close(self) -> None:
        """Free the model; another engine may then be made in this process."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = self._head = None

    def _open(self) -> SGLangScheduler:
        if self._scheduler is None:
            raise EngineBroken("the engine was closed")
        return self._scheduler


def _scored(id: bytes, scores: TextScores | None, logsumexp: float) -> Outcome:
    if scores is not None:
        return Outcome(id, answer=scores)
    if logsumexp != 0:
        return Outcome.of_row(id, np.empty(0, np.float32), logsumexp)
    reason = "SGLang computed no scores for some of this text's tokens"
    return Outcome(id, error=PromptFailed(reason))

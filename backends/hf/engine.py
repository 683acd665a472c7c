"""Hugging Face transformers as an engine.

Each distinct token position of a batch is computed once, and kept within a bound of memory: a
prompt costs what is new in it. Models and prompts for which that would not be right are computed in
padded forward passes of prompts of like length, and keep nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.admission import of_another_head
from lmpool.backends.batch import BatchEngine
from lmpool.backends.device import HostCopies, avoid_cudnn_attention
from lmpool.backends.engine import EngineInfo, Measures, Outcome, Request, Tokens
from lmpool.backends.grouping import MAX_LOGITS
from lmpool.backends.hf.adapters import LoraAdapters
from lmpool.backends.hf.attention import share_keys
from lmpool.backends.hf.forward import Forward
from lmpool.backends.hf.hidden import States, head_of, parted
from lmpool.backends.hf.model import (
    LoadedModel,
    known_special_tokens,
    load_model,
    prompt_bounds,
)
from lmpool.backends.hf.outcomes import Batch, Finish, fits_bfloat16
from lmpool.backends.hf.packed_fit import execution, packed_forward
from lmpool.backends.hf.packed_layout import Bounds, Indices
from lmpool.backends.hf.probes import first_row, longest_placed, measure
from lmpool.backends.model_config import longest_prompt
from lmpool.backends.model_files import ModelFiles
from lmpool.backends.options import check_positive
from lmpool.backends.progress import stage
from lmpool.backends.trie_runs import TrieStatistics
from lmpool.errors import EngineBroken, PromptFailed, SettingsError

logger = logging.getLogger(__name__)

# On a CPU what fits its caches is computed fastest; a GPU wants to be filled.
_FORWARD_TOKENS_CPU: Final = 1_024
_FORWARD_TOKENS_GPU: Final = 16_384
_SCORED_PASSES: Final = 4
"""So many forward passes' worth of texts are scored before others get in between."""
_HEAD_BYTES_CPU: Final = 64 << 20
_HEAD_BYTES_GPU: Final = 256 << 20
_HEAD_ROWS: Final = (16, 256)
"""Few rows waste the head's matrix product; on a CPU more than these do not help it."""

_MOST_THREADS: Final = 1_024
"""Of how many torch does not refuse to begin, and cannot make."""


class HFEngine(BatchEngine):
    """Computes rows with a causal language model of transformers.

    `model` is ``tiny``, a folder, or a hub id (then with an optional `revision`). `dtype` is
    ``float32``, ``bfloat16``, ``float16``, or ``auto``: float32 on a CPU, the model's own
    elsewhere. `device` is a torch device, ``auto`` the first GPU or else the CPU.
    `max_prompt_tokens` lowers the model's own bound. A forward pass takes at most `forward_tokens`
    positions, padding included (by default 1,024 on a CPU, else 16,384), or one prompt.
    `kv_cache_bytes` bounds the memory in which keys and values are kept between batches: by
    default an eighth of what is available to a CPU, at most 4 GiB, or half of what is free on a
    GPU, at most 32 GiB; 0 keeps nothing. On a GPU small forward passes, and those in which it
    would wait for its host, are recorded as CUDA graphs and replayed, where the model bears that,
    unless `enforce_eager`; and cuDNN's attention is switched off in the whole process, as it builds
    a plan for each new shape. On a CPU heads that share keys read them from one place, in the whole
    process, where transformers would copy them for each. `threads` are those that torch computes
    with on a CPU, in the whole process: where workers share a CPU, all their threads together
    should be no more than its cores.
    `model_kwargs` go to `from_pretrained`; bitsandbytes' options (``load_in_4bit``,
    ``bnb_4bit_quant_type``, ...) may be among them.

    How a model computes is measured when it is loaded: it runs in the fastest way that gives the
    rows of plain forward passes, and the log says which.

    Rows are float32 log-probabilities or, from a head that computes in bfloat16, the bits of its
    logits. Raises `SettingsError` for an option that cannot be used, and for a model that has no
    right rows: one that is not causal, or does not repeat itself.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_prompt_tokens: int | None = None,
        forward_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        enforce_eager: bool = False,
        threads: int | None = None,
        trust_remote_code: bool = False,
        model_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        check_positive(forward_tokens=forward_tokens, threads=threads)
        if kv_cache_bytes is not None and (type(kv_cache_bytes) is not int or kv_cache_bytes < 0):
            raise SettingsError(
                f"kv_cache_bytes={kv_cache_bytes!r}: a number of bytes expected, such as "
                f"{1 << 30}, or 0 to keep nothing between batches"
            )
        if threads is not None:
            if threads > _MOST_THREADS:
                raise SettingsError(f"threads={threads}: at most {_MOST_THREADS} expected")
            torch.set_num_threads(threads)
        kwargs = dict(model_kwargs or {})
        self.model_files = ModelFiles(model, revision, trust_remote_code=trust_remote_code)
        stage("weights")
        loaded = load_model(
            self.model_files.folder,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            model_kwargs=kwargs,
        )
        avoid_cudnn_attention(loaded.device)
        share_keys(loaded.device)
        automatic = _FORWARD_TOKENS_CPU if loaded.device.type == "cpu" else _FORWARD_TOKENS_GPU
        self._forward_tokens = forward_tokens or automatic
        self.score_tokens = _SCORED_PASSES * self._forward_tokens
        forward = Forward(loaded.model, loaded.device)
        self._forward: Forward | None = forward
        stage("trial")
        # What a config says of its model may differ from the head (padded, resized vocabularies).
        probe = first_row(forward)
        self._bfloat16 = loaded.dtype == "bfloat16" and fits_bfloat16(probe)
        self._copies = HostCopies(loaded.device)
        self._reduce = loaded.device.type == "cuda"
        self._lora = LoraAdapters(loaded.model, (Path(model).name, self.model_files.folder.name))
        self._head_rows = _head_rows(probe.shape[-1], loaded.device)
        bounds = prompt_bounds(loaded.model, self.model_files.tokenizer)
        longest = longest_placed(forward, longest_prompt(bounds, max_prompt_tokens))
        forward.places = longest
        self.info = self._describe(model, revision, loaded, kwargs, probe.shape[-1], longest)
        self._model_head, reason = head_of(loaded.model, forward, self.info.vocab_size)
        head = None if self._model_head is None else self._model_head.form
        self.info = replace(self.info, head=head, no_head=reason)
        forward.sharing = measure(forward, longest)
        fit = packed_forward(
            loaded.model,
            forward,
            device=loaded.device,
            kv_cache_bytes=kv_cache_bytes,
            longest=longest,
            bounds=Bounds(self._forward_tokens, max(1, MAX_LOGITS // self.info.vocab_size)),
            recorded=loaded.device.type == "cuda" and not enforce_eager,
        )
        self._packed, self._packed_longest = fit.packed, fit.longest
        self._padded_tokens = 0
        if fit.packed is not None:
            fit.packed.head_rows = self._head_rows
        self.info = replace(self.info, execution=execution(fit, forward.sharing, longest))

    def _describe(
        self,
        name: str,
        revision: str | None,
        loaded: LoadedModel,
        kwargs: Mapping[str, Any],
        vocab_size: int,
        longest: int,
    ) -> EngineInfo:
        files = self.model_files
        assert files is not None
        embedded = int(loaded.model.get_input_embeddings().weight.shape[0])
        if embedded < vocab_size:
            raise SettingsError(
                f"the model {name!r} has rows of {vocab_size} tokens but embeds {embedded}: some "
                "of the tokens that it predicts cannot continue a prompt"
            )
        special = known_special_tokens(loaded.model, files.tokenizer, vocab_size)
        return EngineInfo(
            engine="hf",
            model=name,
            revision=revision,
            vocab_size=vocab_size,
            max_prompt_tokens=longest,
            dtype=loaded.dtype,
            encoding="bf16" if self._bfloat16 else "f32",
            identity={
                "engine": "hf",
                "dtype": loaded.dtype,
                "files": files.identity(),
                "model_kwargs": json.dumps(kwargs, sort_keys=True, default=str),
            },
            bos_token_id=special.bos,
            eos_token_ids=special.eos,
            pad_token_id=special.pad,
        )

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        grouped: dict[str | None, list[Request]] = {}
        for request in requests:
            grouped.setdefault(request.adapter, []).append(request)
        outcomes: list[Outcome] = []
        # The adapter in use first: to take up another costs a walk through the model.
        for adapter in sorted(grouped, key=lambda adapter: adapter != self._lora.in_use):
            self._lora.use(adapter)
            states, others = parted(grouped[adapter])
            if others:
                batch = Batch(others, self._copies, bfloat16=self._bfloat16, reduce=self._reduce)
                outcomes += self._compute(batch, adapter)
            if states:
                outcomes += self._states(states, adapter)
        return outcomes

    def _states(self, requests: Sequence[Request], adapter: str | None) -> list[Outcome]:
        """The hidden states of requests that all use `adapter`, which is in use."""
        if self._lora.changes_head(adapter):
            assert adapter is not None
            error = PromptFailed(of_another_head(adapter))
            return [Outcome(request.id, error=error) for request in requests]
        head = self._open().head
        assert head is not None
        with head.giving_states():
            return self._compute(States(requests), adapter)

    def _compute(self, batch: Batch | States, adapter: str | None) -> list[Outcome]:
        """Compute what is asked by requests that all use `adapter`, which is in use."""
        forward = self._open()
        try:
            left = self._run_packed(batch, adapter)
            taken = []
            groups = forward.groups(
                [batch.prompts[i].size for i in left],
                forward_tokens=self._forward_tokens,
                vocab_size=self.info.vocab_size,
            )
            for group in groups:
                taken += self._run_padded(forward, batch, [left[i] for i in group])
            for finish in taken:
                finish()
        except torch.OutOfMemoryError:
            if self._packed is not None and self._packed.graphs is not None:
                self._packed.graphs.clear()  # they hold on to memory
            torch.cuda.empty_cache()
            raise  # a smaller batch may fit
        except torch.AcceleratorError as error:
            # An asynchronous CUDA error leaves the process without a usable device.
            raise EngineBroken(f"{type(error).__name__}: {error}") from error
        return list(batch.outcomes())

    def _run_packed(self, batch: Batch | States, adapter: str | None) -> list[int]:
        """Compute what the packed forward serves; return the numbers of the other prompts."""
        prompts, counts = batch.prompts, batch.counts
        if self._packed is None:
            return list(range(len(prompts)))
        short = [i for i, prompt in enumerate(prompts) if prompt.size <= self._packed_longest]
        left = [i for i, prompt in enumerate(prompts) if prompt.size > self._packed_longest]

        def take(numbers: list[int], depths: Indices, logits: torch.Tensor) -> Finish:
            finish = batch.take([short[i] for i in numbers], depths, logits, last=False)

            def finish_renumbered() -> list[int]:
                refused = set(finish())
                return [i for i in numbers if short[i] in refused]

            return finish_renumbered

        served = [prompts[i] for i in short]
        wanted = None if counts is None else [counts[i] for i in short]
        left += [short[i] for i in self._packed.run(served, take, adapter, wanted)]
        return left

    def _run_padded(
        self, forward: Forward, batch: Batch | States, numbers: list[int]
    ) -> list[Finish]:
        """Compute prompts in one padded forward pass."""
        prompts = [batch.prompts[i] for i in numbers]
        self._padded_tokens += sum(prompt.size for prompt in prompts)
        if batch.counts is None:
            depths = np.array([prompt.size - 1 for prompt in prompts])
            return [batch.take(numbers, depths, forward(prompts), last=True)]
        counts = [batch.counts[i] for i in numbers]
        owners = np.repeat(numbers, counts)
        depths = np.concatenate(
            [np.arange(p.size - n, p.size) for p, n in zip(prompts, counts, strict=True)]
        )
        taken, at = [], 0
        for logits in forward.blocks(prompts, counts, self._head_rows):
            some = slice(at, at := at + len(logits))
            taken.append(batch.take(owners[some].tolist(), depths[some], logits, last=True))
            del logits  # before the next block is computed
        return taken

    @property
    def shares_up_to(self) -> int:
        packed = self._packed
        return 0 if packed is None else min(self._packed_longest, packed.slots)

    def continues(self, tokens: int) -> bool:
        return self._packed is not None and tokens - 1 <= self.shares_up_to

    def _open(self) -> Forward:
        if self._forward is None:
            raise EngineBroken("the engine was closed")
        return self._forward

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter that PEFT saved in folder `path`, replacing one of that name.

        Raises `AdapterError` where it does not fit the model; the engine goes on as before.
        """
        forward = self._open()
        self.finish_adapter(name)
        try:
            self._lora.add(name, Path(path))
        finally:
            forward.follow()
        self.adapters[name] = path
        if self._packed is not None:
            self._packed.forget(name)

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter, and forget the keys and values that it computed."""
        if self.adapters.pop(name, None) is not None:
            self.refuse_adapter(name)
            self._lora.remove(name)
            if self._packed is not None:
                self._packed.forget(name)

    def head_weights(self, rows: slice) -> npt.NDArray[Any]:
        self._open()
        assert self._model_head is not None
        return self._model_head.weights(rows)

    def head_bias(self) -> npt.NDArray[np.float32]:
        self._open()
        assert self._model_head is not None
        return self._model_head.bias()

    def cache_prefix(self, tokens: Tokens) -> None:
        """Compute a prefix and keep it until `clear_cache`; such prefixes may fill half the memory.

        Raises `PromptFailed` for a prefix that cannot be kept.
        """
        self._open()
        reason = self._reason_to_refuse(Request(b"prefix", tokens))
        if reason is None and self._packed is None:
            reason = "this engine keeps nothing between batches"
        if reason is None and tokens.size > self._packed_longest:
            reason = f"a prefix of {tokens.size} tokens: {self._packed_longest} can be kept"
        if reason is None:
            (outcome,) = self.compute([Request(b"prefix", tokens)])
            if outcome.error is not None:  # kept, it would spoil all that extend it
                raise outcome.error
        if reason is None and self._packed is not None and not self._packed.keep_prefix(tokens):
            reason = (
                f"a prefix of {tokens.size} tokens is more than there is room for: clear the cache "
                "of other prefixes, or start with more kv_cache_bytes"
            )
        if reason is not None:
            raise PromptFailed(reason)

    def clear_cache(self) -> None:
        """Forget the keys and values of all prompts and prefixes."""
        if self._packed is not None:
            self._packed.clear()

    def kv_cache_bytes(self) -> int:
        """The memory taken for keys and values that are kept between batches."""
        return 0 if self._packed is None else self._packed.kv_cache_bytes

    def measures(self) -> Measures:
        """Tokens that went through the model, and the keys and values kept of them."""
        packed = self._packed
        if packed is None:
            return Measures(computed_tokens=self._padded_tokens)
        return packed.measures(self._padded_tokens)

    def statistics(self) -> TrieStatistics | None:
        """What is kept between batches, in token positions; None where nothing is."""
        return None if self._packed is None else self._packed.statistics()

    def close(self) -> None:
        """Free the model."""
        if self._forward is not None:
            self._forward.close()
            self._forward = self._packed = self._model_head = None
            self._lora = LoraAdapters(None)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _head_rows(vocab_size: int, device: torch.device) -> int:
    """How many rows of logits of a text are there at once."""
    least, most = _HEAD_ROWS
    if device.type == "cpu":
        return max(least, min(most, _HEAD_BYTES_CPU // (4 * vocab_size)))
    return max(least, _HEAD_BYTES_GPU // (4 * vocab_size))

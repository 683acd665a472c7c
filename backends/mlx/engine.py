"""MLX as an engine: batches with kept prefixes, on Apple GPUs or any CPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.batch import BatchEngine
from lmpool.backends.engine import EngineInfo, Measures, Outcome, Request, Tokens
from lmpool.backends.grouping import forward_passes, of_equal_prompts
from lmpool.backends.mlx.adapters import Adapters
from lmpool.backends.mlx.hidden import head_of
from lmpool.backends.mlx.model import Forward, KeyValueStore, Prefixes, load_model, mx, on_gpu
from lmpool.backends.mlx.prefixes import KeptPrefixes, common_prefix
from lmpool.backends.mlx.reduction import to_host
from lmpool.backends.mlx.rotary import within_short
from lmpool.backends.mlx.small_answers import reduced
from lmpool.backends.mlx.texts import before, problem_of_head, scored
from lmpool.backends.model_files import ModelFiles
from lmpool.backends.options import check_positive
from lmpool.backends.progress import stage
from lmpool.backends.words import alike, asked_of_row
from lmpool.cache_memory import default_cache_bytes
from lmpool.errors import EngineBroken, PromptFailed, SettingsError
from lmpool.wants import Hidden, Score

logger = logging.getLogger(__name__)

_FORWARD_TOKENS_CPU: Final = 1_024
_FORWARD_TOKENS_GPU: Final = 8_192

_SHARED_TOKENS: Final = 16
"""A prefix that prompts of a batch share is computed first if it has this many new tokens."""

_TOLERANCE: Final = {"float32": 1e-3}
_TOLERANCE_HALF_PRECISION: Final = 0.1

_Rows = npt.NDArray[np.float32] | npt.NDArray[np.uint16]


class MLXEngine(BatchEngine):
    """Computes rows with a language model of mlx-lm.

    `model` is ``tiny``, a folder (also of a model that mlx-lm has quantized), or a hub id (then
    with an optional `revision`). `dtype` is ``float32``, ``bfloat16``, ``float16``, or ``auto``:
    the model's own on a GPU, float32 on a CPU. `max_prompt_tokens` lowers the model's own bound. A
    forward pass takes at most `forward_tokens` new positions, padding included (by default 1,024
    on a CPU, else 8,192); longer prompts are computed piece by piece. Keys and values of prompts
    are kept in up to `cache_bytes` bytes (by default an eighth of the memory that is available, at
    most 4 GiB), least recently used first out, and prompts that begin alike share them; 0 keeps
    nothing.

    Models that need more than the keys and values of every position (sliding windows, recurrent
    states) are served without padding and without kept prefixes; a warning says so, and
    `keeps_prefixes` is False. Where mlx-lm has the layers see all instead of a window, as Mistral's
    and Gemma 2's, no prompt is longer than the window, and none of a ``longrope`` model than its
    original positions.

    Rows are float32 log-probabilities or, from a head that computes in bfloat16, the bits of its
    logits. The thread that makes the engine is the only one that may use it: MLX evaluates an array
    on the thread that it was made on. Raises `SettingsError` for a model or an option that cannot
    be used.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        max_prompt_tokens: int | None = None,
        forward_tokens: int | None = None,
        cache_bytes: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        check_positive(forward_tokens=forward_tokens)
        if cache_bytes is not None and (type(cache_bytes) is not int or cache_bytes < 0):
            raise SettingsError(f"cache_bytes={cache_bytes!r}: 0 or more bytes expected")
        self._thread = threading.get_ident()
        files = ModelFiles(model, revision, trust_remote_code=trust_remote_code)
        self.model_files = files
        longest = files.config.longest_prompt(max_prompt_tokens)
        stage("weights")
        loaded = load_model(
            files.folder, files.config, dtype=dtype, trust_remote_code=trust_remote_code
        )
        # Copied off a GPU is what was asked for. On a CPU NumPy reduces faster, and copies nothing.
        self._reduce = on_gpu()
        automatic = _FORWARD_TOKENS_GPU if on_gpu() else _FORWARD_TOKENS_CPU
        self._forward_tokens = forward_tokens or automatic
        self._forward: Forward | None = Forward(loaded)
        if self._forward.has_plain_cache():
            name = type(loaded).__module__
            longest = files.config.within_window(longest, max_prompt_tokens, name)
        longest = within_short(longest, max_prompt_tokens, files.config, type(loaded).__module__)
        self._lora = Adapters(loaded, files.folder)
        self._store: KeyValueStore | None = None
        self._kept = KeptPrefixes(0)
        stage("trial")
        probe = self._forward.plainly([np.zeros(1, np.uint32)])
        mx.eval(probe)
        vocab_size = int(probe.shape[-1])
        head_dtype = str(probe.dtype).removeprefix("mlx.core.")
        self._bfloat16 = head_dtype == "bfloat16"
        special = files.config.special_tokens(vocab_size)
        self.info = EngineInfo(
            engine="mlx",
            model=model,
            revision=revision,
            vocab_size=vocab_size,
            max_prompt_tokens=longest,
            dtype=head_dtype,
            encoding="bf16" if self._bfloat16 else "f32",
            identity={"engine": "mlx", "dtype": head_dtype, "files": files.identity()},
            bos_token_id=special.bos,
            eos_token_ids=special.eos,
            pad_token_id=special.pad,
        )
        self.keeps_prefixes = self._try_prefixes(
            default_cache_bytes() if cache_bytes is None else cache_bytes
        )
        """Whether prompts share a padded forward pass and kept prefixes."""
        self.score_tokens = self._forward_tokens if self._try_head() else 0
        special_ids = (special.bos, special.pad, *special.eos)
        self._head, reason = head_of(
            self._forward, vocab_size, special_ids, longest, files.config.config
        )
        head = None if self._head is None else self._head.form
        self.info = replace(self.info, head=head, no_head=reason)

    # --- rows ----------------------------------------------------------------------------------

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        self._open()
        self._kept.begin()
        outcomes: list[Outcome] = []
        for adapter in dict.fromkeys(request.adapter for request in requests):
            self._lora.activate(adapter)
            mine = [request for request in requests if request.adapter == adapter]
            texts = [request for request in mine if isinstance(request.want, Score)]
            states = [request for request in mine if isinstance(request.want, Hidden)]
            rows = [r for r in mine if not isinstance(r.want, Score | Hidden)]
            distinct, asked = of_equal_prompts(rows), of_equal_prompts(states)
            tokens = [same[0].tokens for same in distinct]
            others = [same[0].tokens for same in asked]
            others += [text.tokens[: before(text)] for text in texts if before(text)]
            self._run_shared(adapter, [*tokens, *others])
            for chosen, logits, logsumexp in self._run(adapter, tokens):
                outcomes.extend(self._answered([distinct[i] for i in chosen], logits, logsumexp))
            outcomes.extend(self._hidden(adapter, asked))
            outcomes.extend(self._score(adapter, texts))
        return outcomes

    def _answered(
        self, asked: Sequence[Sequence[Request]], logits: Any, logsumexp: Any
    ) -> Iterator[Outcome]:
        """The outcomes of those that ask for each row of logits, or for what follows from it."""
        rows: list[int] = []
        small: list[tuple[int, Request]] = []
        for place, same in enumerate(asked):
            less = [(place, request) for request in same if self._reduces(request)]
            small += less
            if len(less) < len(same):
                rows.append(place)
        if rows:
            some = [logits, logsumexp]
            if len(rows) < len(asked):
                some = [each[mx.array(rows)] for each in some]
            for place, row, scale in zip(rows, *self._rows(*some), strict=True):
                for request in asked[place]:
                    if not self._reduces(request):
                        yield Outcome.of_row(request.id, row, scale)
        yield from reduced(small, logits, logsumexp)

    def _reduces(self, request: Request) -> bool:
        """Whether what is asked for is reduced where the row is, and no row copied."""
        return self._reduce and alike(asked_of_row(request)) is not None

    @property
    def shares_up_to(self) -> int:
        return self._kept.capacity if self.keeps_prefixes else 0

    def continues(self, tokens: int) -> bool:
        """Where a text's beginning can be kept, no piece computes it again."""
        return self.keeps_prefixes and tokens <= self._kept.capacity

    def _score(self, adapter: str | None, texts: Sequence[Request]) -> Iterator[Outcome]:
        """The outcome of each text, in one pass over what is not kept before its first row."""
        prompts, firsts = [text.tokens[:-1] for text in texts], [before(text) for text in texts]
        for i, states in self._states_from(adapter, prompts, firsts):
            vocab_size = self.info.vocab_size
            yield scored(self._open(), texts[i], states, vocab_size, reduce=self._reduce)

    def _hidden(
        self, adapter: str | None, distinct: Sequence[Sequence[Request]]
    ) -> Iterator[Outcome]:
        """The hidden state after each prompt, for all that ask for it."""
        prompts = [same[0].tokens for same in distinct]
        lasts = [prompt.size - 1 for prompt in prompts]
        for i, states in self._states_from(adapter, prompts, lasts):
            state = to_host(states[0].astype(mx.float32))
            for request in distinct[i]:
                yield Outcome.of_state(request.id, state)

    def _states_from(
        self, adapter: str | None, prompts: Sequence[Tokens], firsts: Sequence[int]
    ) -> Iterator[tuple[int, Any]]:
        """Each prompt's index, and its states [positions, hidden] from its position `first` on."""
        if not self.keeps_prefixes:
            for group in self._groups([prompt.size for prompt in prompts], may_pad=False):
                states = self._open().states_plainly([prompts[i] for i in group])
                for i, own in zip(group, states, strict=True):
                    yield i, own[firsts[i] :]
            return
        for prompt, first in zip(prompts, firsts, strict=True):
            if first:
                self._run_pieces(adapter, prompt[:first])
        kept = [
            self._kept.find(adapter, prompt)[:first]
            for prompt, first in zip(prompts, firsts, strict=True)
        ]
        for chosen in self._alike(prompts, kept):
            states = self._states(adapter, [prompts[i] for i in chosen], [kept[i] for i in chosen])
            for i, own in zip(chosen, states, strict=True):
                yield i, own[firsts[i] - kept[i].size : prompts[i].size - kept[i].size]

    def _run(
        self, adapter: str | None, prompts: Sequence[Tokens]
    ) -> Iterator[tuple[list[int], Any, Any]]:
        """The indices of some prompts, the logits [prompts, vocab] after each, and their logsumexp.

        What they compute is kept on the way.
        """
        if not self.keeps_prefixes:
            for group in self._groups([prompt.size for prompt in prompts], may_pad=False):
                logits = self._open().plainly([prompts[i] for i in group])
                yield group, logits, _logsumexp(logits)
            return
        for prompt in prompts:
            self._run_pieces(adapter, prompt)
        kept = [self._kept.find(adapter, prompt)[: prompt.size - 1] for prompt in prompts]
        for chosen in self._alike(prompts, kept):
            computed = self._compute_group(
                adapter, [prompts[i] for i in chosen], [kept[i] for i in chosen]
            )
            yield chosen, *computed

    def _alike(self, prompts: Sequence[Tokens], kept: Sequence[Any]) -> Iterator[list[int]]:
        """The indices of prompts that share a forward pass.

        Their kept prefixes are of about one length: the shorter ones are padded.
        """
        alike: dict[int, list[int]] = {}
        for index, slots in enumerate(kept):
            alike.setdefault(int(slots.size).bit_length(), []).append(index)
        for members in alike.values():
            sizes = [prompts[i].size - kept[i].size for i in members]
            for group in self._groups(sizes, may_pad=True):
                yield [members[i] for i in group]

    def _run_pieces(self, adapter: str | None, prompt: Tokens) -> None:
        """Compute and keep the beginning of a prompt that is too long for one forward pass."""
        while True:
            kept = self._kept.find(adapter, prompt)
            piece = prompt[: kept.size + self._forward_tokens]
            if piece.size >= prompt.size:
                return
            self._compute_group(adapter, [piece], [kept])
            if self._kept.find(adapter, piece).size < piece.size:
                return  # no room, or it overflows: the rest is computed at once

    def _compute_group(
        self, adapter: str | None, prompts: Sequence[Tokens], kept: Sequence[Any]
    ) -> tuple[Any, Any]:
        """The logits after each prompt and their logsumexp; keep what is new of the prompts."""
        rests = [prompt[slots.size :] for prompt, slots in zip(prompts, kept, strict=True)]
        logits, layers = self._open()(rests, Prefixes.of(kept), self._store)
        logsumexp = _logsumexp(logits)
        # What is read of the store must be read before it is written.
        mx.eval(logits, logsumexp, [(layer.keys, layer.values) for layer in layers])
        self._keep(adapter, prompts, rests, layers, np.isfinite(np.array(logsumexp)))
        return logits, logsumexp

    def _states(self, adapter: str | None, prompts: Sequence[Tokens], kept: Sequence[Any]) -> Any:
        """The states at each prompt's new tokens, padded; keep what is new of the prompts."""
        rests = [prompt[slots.size :] for prompt, slots in zip(prompts, kept, strict=True)]
        states, layers = self._open().states(rests, Prefixes.of(kept), self._store)
        sound = mx.isfinite(states).all(axis=(1, 2))
        mx.eval(states, sound, [(layer.keys, layer.values) for layer in layers])
        self._keep(adapter, prompts, rests, layers, np.array(sound))
        return states

    def _keep(
        self,
        adapter: str | None,
        prompts: Sequence[Tokens],
        rests: Sequence[Tokens],
        layers: Sequence[Any],
        sound: npt.NDArray[np.bool_],
    ) -> None:
        """Keep what `layers` computed of the rests of prompts that are sound.

        What overflows is not kept: attention gives what it does not look at the weight 0, and 0 *
        NaN is NaN. A token that overflows spoils those before it too, and in padding it would spoil
        other prompts.
        """
        try:
            slots, rows, columns = [np.empty(0, np.int64)], [], []
            for row, (prompt, rest) in enumerate(zip(prompts, rests, strict=True)):
                if not sound[row]:
                    continue
                new = self._kept.add(adapter, prompt)
                slots.append(new)
                rows.append(np.full(new.size, row))
                columns.append(np.arange(rest.size - new.size, rest.size))
            where = np.concatenate(slots)
            if where.size and self._store is not None:
                self._store.put(
                    where,
                    layers,
                    mx.array(np.concatenate(rows)),
                    mx.array(np.concatenate(columns)),
                )
        except BaseException:
            self._kept.clear()  # it may promise what the store does not hold
            raise

    def _run_shared(self, adapter: str | None, prompts: Sequence[Tokens]) -> None:
        """Compute and keep what several of the prompts begin with."""
        if self.keeps_prefixes:
            for _ in self._run(adapter, self._shared_prefixes(adapter, prompts)):
                pass

    def _shared_prefixes(self, adapter: str | None, prompts: Sequence[Tokens]) -> list[Tokens]:
        """What several of the prompts begin with and is not kept yet."""
        alike: dict[bytes, list[Tokens]] = {}
        for prompt in prompts:
            beginning = self._kept.find(adapter, prompt).size + _SHARED_TOKENS
            if beginning < prompt.size:
                alike.setdefault(prompt[:beginning].tobytes(), []).append(prompt)
        return [common_prefix(group) for group in alike.values() if len(group) > 1]

    def _groups(self, lengths: Sequence[int], *, may_pad: bool) -> list[list[int]]:
        return forward_passes(
            lengths,
            forward_tokens=self._forward_tokens,
            vocab_size=self.info.vocab_size,
            may_pad=may_pad,
        )

    def _rows(self, logits: Any, logsumexp: Any) -> tuple[_Rows, list[float]]:
        """The rows [prompts, vocab] of logits, and the logsumexp of each one's logits."""
        if self._bfloat16:
            block = logits.view(mx.uint16)
        else:
            block = logits.astype(mx.float32) - logsumexp[:, None]
        return to_host(block), logsumexp.tolist()

    # --- kept prefixes -------------------------------------------------------------------------

    def _try_prefixes(self, cache_bytes: int) -> bool:
        """Try whether kept prefixes and padding give the rows of each prompt alone."""
        forward = self._open()
        name = type(forward.model).__module__
        if not forward.has_plain_cache():
            logger.warning(
                "%s keeps more than keys and values: it is served without kept prefixes and "
                "without padding, which is slower",
                name,
            )
            return False
        longest = self.info.max_prompt_tokens
        ids = np.arange(12, dtype=np.uint32) % self.info.vocab_size
        prompts = [ids[:7], ids[:3], np.concatenate([ids[:5], ids[8:]]), ids[4:8], ids]
        prompts = [prompt[:longest] for prompt in prompts]
        self.keeps_prefixes = True
        try:
            _, layers = forward([ids[:1]], None, None)
            self._store = KeyValueStore(layers, cache_bytes)
            self._kept = KeptPrefixes(self._store.capacity)
            worst = 0.0
            for some in (prompts[:2], prompts):
                self._kept.begin()
                for chosen, logits, logsumexp in self._run(None, some):
                    found = logits.astype(mx.float32) - logsumexp[:, None]
                    plain = mx.concatenate([forward.plainly([some[i]]) for i in chosen])
                    alone = plain.astype(mx.float32) - _logsumexp(plain)[:, None]
                    worst = float(np.maximum(worst, float(mx.abs(found - alone).max())))  # or NaN
            tolerance = _TOLERANCE.get(self.info.dtype, _TOLERANCE_HALF_PRECISION)
            problem = "" if worst <= tolerance else f"its rows differ by {worst:.2g}"
        except Exception as error:  # a model that uses its cache in a way of its own
            problem = f"{type(error).__name__}: {error}"
        self.clear_cache()
        if problem:
            logger.warning(
                "%s cannot be served with kept prefixes (%s): each prompt is computed whole, "
                "without padding, which is slower",
                name,
                problem,
            )
            self._store, self._kept = None, KeptPrefixes(0)
        return not problem

    def _try_head(self) -> bool:
        """Try whether the head alone gives the rows of a text's tokens."""
        ids = np.arange(min(12, self.info.max_prompt_tokens), dtype=np.uint32)
        tolerance = _TOLERANCE.get(self.info.dtype, _TOLERANCE_HALF_PRECISION)
        problem = problem_of_head(self._open(), ids % self.info.vocab_size, tolerance)
        if problem:
            logger.warning("texts are scored by a row for each token, which is slower: %s", problem)
        return not problem

    def cache_prefix(self, tokens: Tokens) -> None:
        """Compute and keep a prefix. Raises `PromptFailed` for one that is no prompt."""
        self._open()
        reason = self._reason_to_refuse(Request(b"", tokens))
        if reason is not None:
            raise PromptFailed(reason)
        if self.keeps_prefixes:
            self._kept.begin()
            self._lora.activate(None)
            for _, _, logsumexp in self._run(None, [tokens]):
                error = Outcome.of_row(b"", np.empty(0, np.float32), logsumexp.item()).error
                if error is not None:
                    raise error

    def measures(self) -> Measures:
        """Tokens that went through the model, and the keys and values kept of them."""
        computed = None if self._forward is None else self._forward.computed_tokens
        kept = self._kept
        return Measures(computed, len(kept), kept.capacity, kept.evicted)

    def clear_cache(self) -> None:
        """Drop all kept prefixes and free their memory."""
        self._kept.clear()
        if self._store is not None:
            self._store.clear()
        mx.clear_cache()

    # --- adapters ------------------------------------------------------------------------------

    def add_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter of PEFT, of linear layers other than the head."""
        self._open()
        self.finish_adapter(name)
        self._lora.add(name, Path(path))
        self._kept.drop(name)
        self.adapters[name] = path

    def remove_adapter(self, name: str) -> None:
        self._lora.remove(name)
        self.refuse_adapter(name)
        self._kept.drop(name)
        self.adapters.pop(name, None)

    # --- the head ------------------------------------------------------------------------------

    def head_weights(self, rows: slice) -> npt.NDArray[Any]:
        self._open()
        assert self._head is not None
        return self._head.weights(rows)

    def head_bias(self) -> npt.NDArray[np.float32]:
        self._open()
        assert self._head is not None
        return self._head.bias()

    # --- the rest ------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model and all that is kept."""
        if self._forward is not None:
            self._forward = self._head = None
            self._store, self._kept = None, KeptPrefixes(0)
            self._lora = Adapters(None, Path())
            mx.clear_cache()

    def _open(self) -> Forward:
        if self._forward is None:
            raise EngineBroken("the engine was closed")
        if threading.get_ident() != self._thread:
            raise EngineBroken("an MLX engine is used on the thread that made it, and on no other")
        return self._forward


def _logsumexp(logits: Any) -> Any:
    return mx.logsumexp(logits.astype(mx.float32), axis=-1)

"""The interface between a worker and whatever computes rows.

An engine takes requests with `submit`, does one piece of work a `step` (a whole batch, or one
scheduler step of a continuously fed engine), and hands out what finished: call `step` until
`in_flight` is 0, since sampled continuations take a step a token. It is called from one thread
only. An engine that takes a batch at a time derives from `BatchEngine` and writes `compute`; one
that is fed while it runs sets `continuous` and implements the three methods itself.
"""

# Engines without adapters or kept state inherit methods that do nothing.
# ruff: noqa: B027

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from lmpool.backends.sampling import Continuation
from lmpool.errors import AdapterError, EngineBroken, EngineError, PromptFailed
from lmpool.model_info import Encoding

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to continue a prompt on the worker.

    `temperature` 0 is greedy. `seed` fixes the draw: one seed and prompt give one continuation,
    alone or in company. Generation stops before the first of `eos_token_ids` or after
    `max_tokens` tokens.
    """

    max_tokens: int
    eos_token_ids: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt: a row of next-token log-probabilities, or a sampled continuation.

    `id` is unique among the requests in flight. `tokens` is uint32 [prompt length], at least one.
    """

    id: bytes
    tokens: Tokens
    adapter: str | None = None
    want: object = None

    @property
    def sampling(self):
        from lmpool.wants import Generate
        w = self.want
        return Sampling(w.max_tokens, tuple(w.eos_token_ids), w.temperature, w.seed) if isinstance(w, Generate) else None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What became of one request: exactly one of a row, sampled tokens, or an error.

    `row` is float32 [vocab], log-probabilities in natural log, normalized; or, where the model's
    head computes in bfloat16, uint16 [vocab], the bits of its bfloat16 logits, with `logsumexp`
    their logsumexp in float32. `row` may be read-only and may be a view of its batch's block, which
    nobody writes again: encode or copy it, for a row that is kept keeps the whole block alive.
    """

    id: bytes
    row: npt.NDArray[np.float32] | npt.NDArray[np.uint16] | None = None
    logsumexp: float = 0.0
    tokens: Tokens | None = None
    error: EngineError | None = None

    @property
    def answer(self):
        from lmpool.wants import Generation
        return None if self.tokens is None else Generation(self.tokens)

    def logprobs(self) -> npt.NDArray[np.float32]:
        """The row as float32 [vocab] log-probabilities. Raises `ValueError` where there is none."""
        if self.row is None:
            raise ValueError("this outcome has no row")
        if self.row.dtype != np.uint16:
            return self.row.astype(np.float32, copy=False)
        # bfloat16 is the upper half of a float32.
        logits: npt.NDArray[np.float32] = (self.row.astype(np.uint32) << 16).view(np.float32)
        return logits - np.float32(self.logsumexp)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves. `identity` holds all that changes its numbers."""

    engine: str
    model: str
    revision: str | None
    vocab_size: int
    max_prompt_tokens: int
    dtype: str
    encoding: Encoding
    identity: Mapping[str, object] = field(default_factory=dict)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None


class Engine(ABC):
    """Computes rows; owned by one thread."""

    continuous: ClassVar[bool] = False
    """True where `submit` may be called while earlier requests are still running."""

    info: EngineInfo

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests in. A request that cannot be run becomes an `Outcome` with an error."""

    @abstractmethod
    def step(self) -> Sequence[Outcome]:
        """Work once and return what finished. Raises `EngineBroken` when it cannot go on."""

    @abstractmethod
    def in_flight(self) -> int:
        """How many submitted requests have had no outcome yet."""

    def cancel(self, ids: Collection[bytes]) -> None:
        """Forget these requests where that is still possible; they may yet have an outcome."""

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path` as `name`, replacing one of that name."""
        raise AdapterError(f"the {self.info.engine} engine has no adapters")

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter; unknown names are ignored."""

    def cache_prefix(self, tokens: Tokens) -> None:
        """Compute and keep the state of a prefix, where the engine keeps state."""

    def clear_cache(self) -> None:
        """Drop every state kept between batches."""

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer's files by name, so that clients need no copy of the model."""
        return {}

    def byte_vocabulary(self) -> list[bytes] | None:
        """The bytes of each token id, or None where no tokenizer is known."""
        return None

    def close(self) -> None:
        """Free what the engine holds."""


class BatchEngine(Engine):
    """An engine that computes one batch at a time.

    A step computes every row asked for since the last one, and one token of every continuation
    under way. `submit` may be called between any two steps.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self._most_prompts = sys.maxsize
        """What fits into memory, once a batch did not."""
        self._waiting: list[Request] = []
        self._continuations: dict[bytes, Continuation] = {}

    @abstractmethod
    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        """One outcome with a row or an error for each request, in any order.

        The prompts were checked: 1 to `max_prompt_tokens` ids, all below `vocab_size`, the adapter
        one of `adapters`; none asks for sampling. An exception fails the batch, which is then
        halved until the request that caused it stands alone; `EngineBroken` passes through.
        """

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)

    def in_flight(self) -> int:
        return len(self._waiting) + len(self._continuations)

    def cancel(self, ids: Collection[bytes]) -> None:
        self._waiting = [r for r in self._waiting if r.id not in ids]
        for cancelled in ids:
            self._continuations.pop(cancelled, None)

    def step(self) -> Sequence[Outcome]:
        batch, self._waiting = self._waiting, []
        accepted, outcomes = self._check(batch)
        rows = [request for request in accepted if request.sampling is None]
        if len(rows) < len(accepted):
            self._begin(accepted, outcomes)
        going_on, refused = self._check([c.next_request() for c in self._continuations.values()])
        for outcome in refused:  # its adapter was removed
            del self._continuations[outcome.id]
        outcomes.extend(refused)
        rows.extend(going_on)
        if rows:
            computed = self._attempt(rows)
            outcomes.extend(self._continue(computed) if self._continuations else computed)
        return outcomes

    def _check(self, batch: Sequence[Request]) -> tuple[Sequence[Request], list[Outcome]]:
        """The requests that can be run, and the refusals of the others."""
        if not batch:
            return [], []
        sizes = [request.tokens.size for request in batch]
        if (
            min(sizes) > 0
            and max(sizes) <= self.info.max_prompt_tokens
            and int(np.concatenate([r.tokens for r in batch]).max()) < self.info.vocab_size
            and all(r.adapter is None and r.sampling is None for r in batch)
        ):
            return batch, []
        accepted: list[Request] = []
        refused: list[Outcome] = []
        for request in batch:
            reason = self._reason_to_refuse(request)
            if reason is None:
                accepted.append(request)
            else:
                refused.append(Outcome(request.id, error=PromptFailed(reason)))
        return accepted, refused

    def _reason_to_refuse(self, request: Request) -> str | None:
        tokens, longest = request.tokens, self.info.max_prompt_tokens
        if not 0 < tokens.size <= longest:
            return f"a prompt of {tokens.size} tokens: 1 to {longest} expected"
        if int(tokens.max()) >= self.info.vocab_size:
            return f"token id {int(tokens.max())}: below {self.info.vocab_size} expected"
        if request.adapter is not None and request.adapter not in self.adapters:
            return f"no adapter named {request.adapter!r} is loaded"
        sampling = request.sampling
        if sampling is not None and not 0.0 <= sampling.temperature < np.inf:
            return f"temperature={sampling.temperature!r}: a finite number, 0 or more, expected"
        return None

    def _begin(self, accepted: Sequence[Request], outcomes: list[Outcome]) -> None:
        for request in accepted:
            if request.sampling is not None:
                longest = self.info.max_prompt_tokens
                continuation = Continuation(request, request.sampling, longest)
                if continuation.finished:
                    outcomes.append(Outcome(request.id, tokens=continuation.drawn))
                else:
                    self._continuations[request.id] = continuation

    def _continue(self, computed: Sequence[Outcome]) -> list[Outcome]:
        """Draw a token of each continuation from its row; return what is not needed for that."""
        outcomes: list[Outcome] = []
        for outcome in computed:
            continuation = self._continuations.get(outcome.id)
            if continuation is None:
                outcomes.append(outcome)
                continue
            if outcome.error is None:
                try:
                    continuation.take(outcome.logprobs())
                except ValueError as error:
                    outcome = Outcome(outcome.id, error=PromptFailed(str(error)))
            if outcome.error is not None:
                del self._continuations[outcome.id]
                outcomes.append(outcome)
            elif continuation.finished:
                del self._continuations[outcome.id]
                outcomes.append(Outcome(outcome.id, tokens=continuation.drawn))
        return outcomes

    def _attempt(self, batch: Sequence[Request]) -> list[Outcome]:
        """Outcomes of a batch, in as many portions as fit into memory."""
        if len(batch) > self._most_prompts:
            most = self._most_prompts
            portions = [batch[i : i + most] for i in range(0, len(batch), most)]
            return [outcome for portion in portions for outcome in self._attempt(portion)]
        half = len(batch) // 2
        try:
            computed = {outcome.id: outcome for outcome in self.compute(batch)}
        except EngineBroken:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if len(batch) == 1:
                logger.warning("a prompt failed: %s", reason)
                return [Outcome(batch[0].id, error=PromptFailed(reason))]
            if _is_out_of_memory(error):
                self._most_prompts = half
                logger.warning(
                    "out of memory at %d prompts, from now on %d at most: %s",
                    len(batch),
                    half,
                    reason,
                )
            else:
                logger.warning("a batch of %d failed (%s): halving it", len(batch), reason)
        else:
            return [computed.get(r.id) or Outcome(r.id, error=_forgotten()) for r in batch]
        return self._attempt(batch[:half]) + self._attempt(batch[half:])


def _is_out_of_memory(error: Exception) -> bool:
    # torch.OutOfMemoryError, and what libraries of a GPU say under names of their own.
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or "outofmemory" in text or "out of memory" in text


def _forgotten() -> PromptFailed:
    return PromptFailed("the engine gave no outcome for this prompt")

"""The interface between a worker and whatever computes rows.

An engine takes requests with `submit`, does one piece of work a `step` (a whole batch, or one
scheduler step of a continuously fed engine), and hands out what finished: call `step` until
`in_flight` is 0, since continuations take a step a token. It is called from one thread only.

An engine that takes a batch at a time derives from `BatchEngine` and writes `compute`; one that is
fed while it runs derives from `ContinuousEngine` and writes how a request begins and ends in it.
"""

# Engines without adapters or kept state inherit methods that do nothing.
# ruff: noqa: B027

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lmpool.backends.model_files import ModelFiles
from lmpool.errors import AdapterError, EngineError, PromptFailed
from lmpool.head_form import HeadForm
from lmpool.model_info import Encoding
from lmpool.uniforms import uniform
from lmpool.wants import Generation, Reduced, Row, Want

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class NextToken:
    """How the token that continues a prompt is drawn from its row.

    At its `place` of the cumulative distribution at this temperature, of what `min_p`, `top_k` and
    `top_p` leave: see `Generate`. `top_logprobs` of the likeliest are wanted, too.
    """

    seed: int
    step: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_logprobs: int = 0

    @property
    def place(self) -> float:
        """In [0, 1): the uniform number of this step under this seed."""
        return uniform(self.seed, self.step)


# Nobody changes one; but there is one for each prompt, and one that is frozen takes longer to make.
@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what is wanted of it.

    `id` is unique among the requests in flight. `tokens` is uint32 [prompt length], at least one.
    A continuation goes on behind what was `begun` of it, the parts in order, by whoever ran it
    before; its answer has those, too. Of one that is computed row by row each row is asked for with
    the `next` token that is drawn from it: whoever draws it where the row is answers with a
    `Generation` of this token alone, and others with the row.
    """

    id: bytes
    tokens: Tokens
    adapter: str | None = None
    want: Want = Row()  # noqa: RUF009 -- frozen
    begun: tuple[Generation, ...] = ()
    next: NextToken | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What was drawn, behind the first `start` tokens, of a continuation that goes on.

    `drawn` is an answer to the same want that has these tokens alone; how it ends says nothing.
    """

    id: bytes
    start: int
    drawn: Generation


class AdapterGone(PromptFailed):
    """The prompt's adapter was removed before this was computed: no failure of the engine."""


@dataclass(slots=True, eq=False)
class Outcome:
    """What became of one request: exactly one of a row, another answer, or an error.

    `row` is float32 [vocab], log-probabilities in natural log, normalized; or, where the model's
    head computes in bfloat16, uint16 [vocab], the bits of its bfloat16 logits, with `logsumexp`
    their logsumexp in float32. `row` may be read-only and may be a view of its batch's block, which
    nobody writes again: encode or copy it, for a row that is kept keeps the whole block alive.
    `answer` is that to a want other than `Row`.
    """

    id: bytes
    row: npt.NDArray[np.float32] | npt.NDArray[np.uint16] | None = None
    logsumexp: float = 0.0
    answer: Reduced | None = None
    error: EngineError | None = None

    @classmethod
    def of_row(
        cls, id: bytes, row: npt.NDArray[np.float32] | npt.NDArray[np.uint16], logsumexp: float
    ) -> Outcome:
        """That of a row of either kind; an error where the logits' `logsumexp` is not finite."""
        if not math.isfinite(logsumexp):
            found = f"the model's logits have the logsumexp {logsumexp}"
            return cls(id, error=PromptFailed(f"{found}: it overflows in this dtype"))
        return cls(id, row=row, logsumexp=logsumexp if row.dtype == np.uint16 else 0.0)

    @classmethod
    def of_state(cls, id: bytes, state: npt.NDArray[np.float32]) -> Outcome:
        """That of a hidden state, float32 [hidden]; an error where it is not finite."""
        if not np.isfinite(state).all():
            return cls(id, error=PromptFailed("the model's hidden state overflows in this dtype"))
        return cls(id, answer=state)

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
    """What an engine serves. `identity` holds all that changes its numbers.

    `execution` says in a line how it computes prompts, and why not in its fastest way: for people.
    `head` is how hidden states become rows, of an engine that answers `Hidden`; that of any other
    says by `no_head` why it does not.
    """

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
    execution: str | None = None
    head: HeadForm | None = None
    no_head: str = "its engine gives none"


@dataclass(frozen=True, slots=True)
class Measures:
    """What an engine has done since it was made, and keeps: for monitoring. None: it cannot tell.

    `computed_tokens` went through the model; a KV state is of one token. `kept_states` of
    `room` for as many are kept between batches, and `evicted_states` gave way to others.
    """

    computed_tokens: int | None = None
    kept_states: int | None = None
    room: int | None = None
    evicted_states: int | None = None


class Engine(ABC):
    """Computes rows; owned by one thread."""

    continuous: ClassVar[bool] = False
    """True where `submit` may be called while earlier requests are still running."""

    info: EngineInfo
    model_files: ModelFiles | None = None
    """Of an engine that loads a model: where its tokenizer is."""

    @property
    def shares_up_to(self) -> int:
        """Tokens of the longest prompts whose common beginning is computed once, where they come in
        one batch, or which never make a step too long; 0: there are none. A worker counts such a
        beginning once in what a batch may have of tokens."""
        return 0

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests in. A request that cannot be run becomes an `Outcome` with an error."""

    @abstractmethod
    def step(self) -> Sequence[Outcome]:
        """Work once and return what finished. Raises `EngineBroken` when it cannot go on."""

    def parts(self) -> Sequence[Part]:
        """What was drawn, since this was last asked, of those that want a `Stream` and go on.

        Whoever submits such wants asks after each step. The parts of a continuation, in order, are
        the beginning of its answer.
        """
        return ()

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

    def measures(self) -> Measures:
        """What it has computed and keeps. Asked after each step: it must cost next to nothing."""
        return Measures()

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer's files by name, so that clients need no copy of the model."""
        return {} if self.model_files is None else self.model_files.tokenizer_files()

    def byte_vocabulary(self) -> list[bytes] | None:
        """The bytes of each token id, or None where no tokenizer is known."""
        return None if self.model_files is None else self.model_files.byte_vocabulary()

    def head_weights(self, rows: slice) -> npt.NDArray[Any]:
        """These rows of the head's matrix [rows, hidden_size], where `info.head` is one.

        float32 or float16, or the bits of bfloat16 as uint16, as `info.head.numbers` says. Raises
        `EngineBroken` once the engine is closed.
        """
        raise PromptFailed(self.info.no_head)

    def head_bias(self) -> npt.NDArray[np.float32]:
        """The head's bias, float32 [vocab], where `info.head` says that there is one.

        Raises `EngineBroken` once the engine is closed.
        """
        raise PromptFailed(self.info.no_head)

    def close(self) -> None:
        """Free what the engine holds."""

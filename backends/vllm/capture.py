"""What a captured request asks of its row of logits, taken where vLLM's sampler passes it.

`CaptureProcessor` is a logits processor for both of vLLM's model runners. It is registered as an
entry point of the group ``vllm.logits_processors``, so every vLLM in an environment with lmpool has
it; there it does nothing until an owner attaches to it, by what `CapturedRows` adds to vLLM's
workers (``worker_extension_cls="lmpool.backends.vllm.capture.CapturedRows"``). The owner gives a
secret prefix, and a request is captured when its sampling parameters carry an id that begins so:

    SamplingParams(max_tokens=1, extra_args={"lmpool_capture": prefix + "some name"})

Whoever else sends requests, over HTTP say, does not know the prefix, and nothing is kept for him.
`lmpool.backends.vllm.own.OwnRows` does all of it for an ``LLM`` of yours. Else, as of an
``AsyncLLM``, attach and take rows with the workers' methods:

    prefix = secrets.token_hex(16)
    await llm.collective_rpc("lmpool_attach", args=(prefix,))
    await llm.collective_rpc("lmpool_take_rows", args=(["some name"],))

A request of several tokens leaves the row of its last one. Rows that nobody takes are dropped, the
oldest first, when they are more bytes than the owner allows. Where a want stands under
``lmpool_answer``, as `lmpool.wants.want_to_wire` has it, the row is reduced on its device to what
answers it, and the row is not copied.

A request with an id under ``lmpool_watch`` leaves a row of no columns, and that only where logits
of any of its tokens were not finite: what was sampled from them means nothing. With a want each
step leaves an answer as well: ``name/0`` is that of the row which its first token is drawn from.

Where no token of a whole batch counts (``lmpool_only_row`` beside each id), nothing is sampled in
the V1 runner: the logits are the rows' from then on, and the sampler looks through one column.

One with an id under ``lmpool_score`` is a text that the `scorer` follows through the batch by way
of this processor, one with an id under ``lmpool_hidden`` a prompt whose hidden state `states` keeps
as if it were a row.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorV1

from lmpool.backends.vllm import internals
from lmpool.backends.vllm.activations import put_activations_right
from lmpool.backends.vllm.base_rows import keep_base_rows
from lmpool.backends.vllm.row_store import (
    MOST_BYTES,
    STEP,
    AnswerBlock,
    HostCopy,
    RowBlock,
    RowStore,
    Taken,
    WatchedLogits,
)
from lmpool.backends.vllm.scorer import SCORE, Scorer, ScoringWorker
from lmpool.backends.vllm.states import HIDDEN, HeadWorker
from lmpool.backends.words import alike
from lmpool.wants import Want, want_from_wire

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorV2
except (
    ImportError
):  # a release without the second model runner, whose capture needs the first alone
    ProcessorV2 = object

logger = logging.getLogger(__name__)

put_activations_right()  # a worker imports this before it makes its model

CAPTURE: Final = "lmpool_capture"
"""The key of `SamplingParams.extra_args` whose value, a str, asks for the row and names it."""

WATCH: Final = "lmpool_watch"
"""The same, of a request whose logits are watched."""

ANSWER: Final = "lmpool_answer"
"""The key of what is asked of the row of a captured request, or of each row of a watched one."""

ONLY_ROW: Final = "lmpool_only_row"
"""The key, beside one of these, that says that nobody reads the token which the request draws."""

KEYS: Final = (CAPTURE, WATCH, SCORE, HIDDEN)

SHORTEST_PREFIX: Final = 16
"""Characters that an owner's secret has at least."""

STEPS_KEPT: Final = 4
"""Steps whose rows always find room: vLLM may be so far ahead of whoever takes them."""

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "min_tokens": (0,),
    "structured_outputs": (None,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}
"""What changes logits before the processors of others see them, in one of vLLM's two runners or in
both, and the values with which it does not."""


class Asked(NamedTuple):
    """What is asked of a request."""

    key: str
    """One of `KEYS`."""
    name: str
    """What stands behind the owner's prefix."""
    extra: Mapping[str, Any]
    """The request's `extra_args`."""
    want: Want | None
    """What its row is reduced to, if it is."""
    drawn: Sequence[int]
    """The tokens that the V1 runner has drawn for it so far; it goes on appending to them."""
    only_row: bool
    """Whether these are nobody's."""


class _Found(NamedTuple):
    """A row of a step that somebody asked for."""

    row: int
    asked: Asked
    step: int
    """How many tokens its request had drawn before."""

    @property
    def name(self) -> str:
        """What it is kept by."""
        asked = self.asked
        return f"{asked.name}{STEP}{self.step}" if asked.key == WATCH else asked.name


Copied = tuple[list[str], int, str, int, list[float]]
"""`Taken` with the rows elsewhere: names, offset in bytes, dtype, vocabulary, the float32s."""


class CaptureProcessor(ProcessorV1, ProcessorV2):  # type: ignore[misc]
    """Captures rows in whichever of vLLM's model runners loads it.

    The V1 runner makes it with a device and whether to pin memory, and speaks of batch positions;
    the V2 runner with its request states, and speaks of slots. `unfinished`, where it is set, tells
    which positions of the V1 runner's batch are prefills that go on: their rows are nobody's.
    Without it they are overwritten by the row of the whole prompt, which comes last.

    A runner may have loaded several, by the entry point and by name: only the one that the owner
    attaches to, the first, does anything.
    """

    def __init__(self, vllm_config: Any, *runner: Any) -> None:
        keep_base_rows()
        self._states: Any = runner[0] if len(runner) == 1 else None
        self._prefix: str | None = None
        """What the ids of its owner's requests begin with; None as long as nobody owns it."""
        self._asked: dict[int, Asked] = {}
        """By batch position (V1) or request slot (V2)."""
        self._bfloat16 = vllm_config.model_config.dtype == torch.bfloat16
        self._stream: torch.cuda.Stream | None = None
        self.unfinished: Callable[[], npt.NDArray[np.bool_]] | None = None
        self.before_sampling: Callable[[], None] | None = None
        self.is_last = False
        """Whether the V1 runner's sampler reads what `apply` returns, and no other processor."""
        self.rows = RowStore()
        self.watched = WatchedLogits()
        self.scorer: Scorer | None = None
        self.gives_states = False
        # Every rank of a tensor-parallel group sees all logits; one of them publishes.
        self.publishes = _is_publisher()

    def attach(self, prefix: str, most_bytes: int = MOST_BYTES) -> None:
        """Capture from now on what has an id with this prefix; nothing that was asked before."""
        if not isinstance(prefix, str) or len(prefix) < SHORTEST_PREFIX:
            raise ValueError(
                f"a secret prefix of {SHORTEST_PREFIX} characters or more expected: "
                "secrets.token_hex(16) makes one"
            )
        self.detach()
        self.rows.most_bytes = most_bytes
        self._prefix = prefix

    def detach(self) -> None:
        """Capture nothing, and drop what is kept."""
        self._prefix = None
        self._asked.clear()
        self.rows = RowStore()
        self.watched = WatchedLogits()
        if self.scorer is not None:
            self.scorer.clear()

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse what cannot be captured, when the request comes."""
        asked = _asked(sampling_params)
        if asked is None:
            return
        key, name = asked
        if not isinstance(name, str):
            raise ValueError(f"extra_args[{key!r}]={name!r:.100}: a str expected")
        if sampling_params.n != 1:
            raise ValueError(f"extra_args[{key!r}] with n={sampling_params.n}: write n=1")
        if key != CAPTURE:
            return
        for option, neutral in NEUTRAL.items():
            value = getattr(sampling_params, option, neutral[0])
            if value not in neutral:
                raise ValueError(
                    f"extra_args[{key!r}] with {option}={value!r:.100}: a row is the model's own, "
                    f"and this would change it; write {option}={neutral[0]!r}"
                )

    def is_argmax_invariant(self) -> bool:
        # Invariant processors are left out where all is greedy, and run after the temperature.
        return False

    # The V1 runner.

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow what was removed from, added to and moved within the runner's batch."""
        if batch_update is None:
            return
        places = self._asked
        for position in batch_update.removed:
            places.pop(position, None)
        for position, params, _prompt, drawn in batch_update.added:
            self._assign(position, params, drawn)
        for first, second, direction in batch_update.moved:
            moved, displaced = places.pop(first, None), places.pop(second, None)
            if moved is not None:
                places[second] = moved
            if direction == MoveDirectionality.SWAP and displaced is not None:
                places[first] = displaced

    # The V2 runner.

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Follow a request into its slot; whether the sampler must call `apply` for it."""
        return self._assign(req_idx, sampling_params)

    def _assign(self, place: int, params: Any, drawn: Sequence[int] = ()) -> bool:
        asked = self._owned(params, drawn)
        if asked is None:
            self._asked.pop(place, None)
            return False
        self._asked[place] = asked
        return True

    def _owned(self, params: Any, drawn: Sequence[int]) -> Asked | None:
        """What the owner asks of a request, if it is one of his."""
        key, name = _asked(params) or (CAPTURE, None)
        # Every rank helps to compute the scores of texts.
        if self._prefix is None or not (self.publishes or key == SCORE):
            return None
        if not isinstance(name, str) or not name.startswith(self._prefix):
            return None
        want = params.extra_args.get(ANSWER)
        return Asked(
            key,
            name[len(self._prefix) :],
            params.extra_args,
            None if want is None else want_from_wire(want),
            drawn,
            bool(params.extra_args.get(ONLY_ROW)),
        )

    def asking_for(self, wanted: str) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        """What asks in the batch by a key: the place of each, its name, and its `extra_args`."""
        for place, asked in self._asked.items():
            if asked.key == wanted:
                yield place, asked.name, asked.extra

    def end(self, names: Sequence[str]) -> None:
        """These requests have ended, or nobody waits for them: drop what is kept of them."""
        self.rows.forget(names)
        self.watched.take(names)
        gone = set(names)
        watched = [place for place, asked in self._asked.items() if asked.key == WATCH]
        for place in watched:
            if self._asked[place].name in gone:
                del self._asked[place]  # a runner that works ahead would leave more of it

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Keep the rows of captured requests, or answers.

        `logits` pass unchanged, but for a batch of which no token counts: of that a column passes.
        """
        if self.before_sampling is not None:
            self.before_sampling()
        unread = self._is_unread(logits)
        if self._asked:
            found = self._by_position(logits) if ctx is None else self._by_slot(logits, ctx)
            found.sort(key=lambda each: each.row)
            if self._stream is None and logits.is_cuda:
                self._stream = torch.cuda.Stream(logits.device)
            self._answer(logits, found)
            self._watch(logits, [e for e in found if e.asked.key == WATCH])
            rows = [e for e in found if e.asked.key == CAPTURE and not e.asked.want]
            self._capture(logits, rows, unread=unread)
        return logits.new_zeros((len(logits), 1)) if unread else logits

    def _is_unread(self, logits: torch.Tensor) -> bool:
        """Whether nobody looks at the logits of this batch once its rows are kept."""
        return (
            self.is_last
            and len(self._asked) == len(logits)
            and all(asked.only_row for asked in self._asked.values())
        )

    def _capture(self, logits: torch.Tensor, found: Sequence[_Found], *, unread: bool) -> None:
        if found:
            rows = _select(logits, [each.row for each in found]).float()
            block = RowBlock(
                rows,
                bfloat16=self._bfloat16,
                stream=self._stream,
                owned=unread or rows is not logits,
            )
            self.rows.put((each.asked.name for each in found), block)

    def _answer(self, logits: torch.Tensor, found: Sequence[_Found]) -> None:
        kinds: dict[Hashable, list[_Found]] = {}
        for each in found:
            if each.asked.want is not None:
                kinds.setdefault(alike(each.asked.want), []).append(each)
        for same in kinds.values():
            wants = [each.asked.want for each in same]
            block = AnswerBlock(logits, [each.row for each in same], wants, self._stream)
            self.rows.put((each.name for each in same), block)

    def _watch(self, logits: torch.Tensor, found: Sequence[_Found]) -> None:
        if found:
            rows = _select(logits, [each.row for each in found])
            largest = HostCopy([rows.amax(dim=-1).float()], self._stream)
            self.watched.put([each.asked.name for each in found], largest)

    def _by_position(self, logits: torch.Tensor) -> list[_Found]:
        found = [_Found(i, asked, len(asked.drawn)) for i, asked in self._asked.items()]
        if self.unfinished is None:
            return found
        unfinished = self.unfinished()
        if len(unfinished) != logits.shape[0]:
            return self._refuse(logits, len(unfinished))
        return [each for each in found if not unfinished[each.row]]

    def _by_slot(self, logits: torch.Tensor, ctx: Any) -> list[_Found]:
        slots = ctx.idx_mapping_np
        if len(slots) != logits.shape[0]:
            return self._refuse(logits, len(slots))
        lengths, states = ctx.seq_lens_upper_bound_np, self._states
        return [
            _Found(row, self._asked[slot], int(lengths[row] - states.prompt_len.np[slot]))
            for row, slot in enumerate(slots.tolist())
            if slot in self._asked and lengths[row] >= states.prefill_len.np[slot]
        ]

    def _refuse(self, logits: torch.Tensor, requests: int) -> list[_Found]:
        # Better no row than another request's.
        logger.error(
            "%d rows of logits for %d requests (speculative decoding?): none is captured",
            logits.shape[0],
            requests,
        )
        return []


def _asked(params: Any) -> tuple[str, Any] | None:
    extra = params.extra_args or {}
    return next(((key, extra[key]) for key in KEYS if extra.get(key) is not None), None)


def _select(logits: torch.Tensor, positions: list[int]) -> torch.Tensor:
    if positions == list(range(logits.shape[0])):
        return logits
    index = torch.tensor(positions, dtype=torch.int64, pin_memory=logits.is_cuda)
    return logits.index_select(0, index.to(logits.device, non_blocking=True))


def _is_publisher() -> bool:
    """Whether this is the first of the ranks that see logits."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return True
    return bool(
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_pp_group().is_last_rank
    )


class CapturedRows(ScoringWorker, HeadWorker):
    """What vLLM's workers are extended by: reading captured rows, wherever the worker runs."""

    model_runner: Any

    def lmpool_attach(self, prefix: str, most_bytes: int | None = None) -> str | None:
        """Capture the requests whose ids begin with `prefix`, for whoever calls this last.

        Returns the model runner's generation, None where it cannot capture. `most_bytes` bounds
        the rows that wait to be taken; by default they are 2 GiB, or what a few steps make. Raises
        ValueError for a short prefix, and with speculative decoding.
        """
        if self.model_runner.vllm_config.speculative_config is not None:
            raise ValueError(internals.SPECULATES)
        if most_bytes is None:
            most_bytes = max(MOST_BYTES, internals.step_bytes(self.model_runner) * STEPS_KEPT)
        generation = internals.attach(self.model_runner)
        capture = internals.find_capture(self.model_runner)
        if capture is not None:
            capture.attach(prefix, most_bytes)
        return generation

    def lmpool_detach(self) -> None:
        """Capture nothing any more."""
        capture = internals.find_capture(self.model_runner)
        if capture is not None:
            capture.detach()

    def lmpool_take_rows(
        self, names: Sequence[str], forget: Sequence[str] = ()
    ) -> list[Taken] | None:
        """Give out rows, then drop what is kept of the requests in `forget`; None where this rank
        does not publish."""
        capture = internals.find_capture(self.model_runner)
        if capture is None or not capture.publishes:
            return None
        taken = capture.rows.take(names)
        if unsound := capture.watched.take(names):
            none = np.empty((len(unsound), 0), np.float32)
            taken.append((unsound, none, np.full(len(unsound), np.nan, np.float32)))
        if forget:
            capture.end(forget)
        return taken

    def lmpool_copy_rows(
        self, path: str, names: Sequence[str], forget: Sequence[str] = ()
    ) -> list[Copied] | None:
        """The same, with the rows copied into the mapped file `path`, one block after the other."""
        taken = self.lmpool_take_rows(names, forget)
        if taken is None:
            return None
        memory = _mapped(path)
        copied: list[Copied] = []
        offset = 0
        for found, rows, scale in taken:
            size = rows.nbytes
            memory[offset : offset + size] = rows.reshape(-1).view(np.uint8)
            copied.append((found, offset, rows.dtype.str, rows.shape[1], scale.tolist()))
            offset += size
        return copied


@functools.cache  # the file has a name at the first call only
def _mapped(path: str) -> npt.NDArray[np.uint8]:
    return np.memmap(path, np.uint8, mode="r+")

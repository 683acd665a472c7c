"""Reading one continuation piece by piece, from a thread or an event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from lmpool.errors import (
    JobExpired,
    LmpoolError,
    PoolMismatch,
    PoolTimeout,
    PromptFailed,
    UnknownAdapter,
)
from lmpool.producer.blocking import is_blocking, running_loop
from lmpool.producer.caller import answers_of
from lmpool.producer.client import Client
from lmpool.producer.deadline import Deadline
from lmpool.producer.pieces import StreamCall
from lmpool.producer.waits import never_lost
from lmpool.tracing import CallSpan, active, begin_call
from lmpool.wants import FinishReason, Generation, TopLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens of a continuation that were drawn one after another.

    `number` says how many came before them: 0 of the first piece. `token_ids` int32 [n], at least
    one, but for a last piece that has none; `logprobs` float32 [n] and `top_logprobs`, of [n, k],
    [n, k] and [n], where they were asked for. The last piece alone has a `finish_reason`, and
    `ending`: how many tokens, at the end of all, are the EOS token or a stop sequence, of which
    earlier pieces may have a part. For both see `Generation`.
    """

    number: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32] | None = None
    top_logprobs: TopLogprobs | None = None
    finish_reason: FinishReason | None = None
    ending: int = 0


class PieceReader:
    """Hands out the pieces of one continuation.

    `begin` makes its job; `again` says, of what was found wrong before the first piece, whether
    there is reason to begin once more.
    """

    def __init__(
        self,
        client: Client,
        deadline: Deadline,
        begin: Callable[[], Awaitable[StreamCall]],
        again: Callable[[LmpoolError], bool],
    ) -> None:
        self._client = client
        self._deadline = deadline
        self._begin = begin
        self._again = again
        self._call: StreamCall | None = None
        self._read = 0
        """Parts that were handed out."""
        self._number = 0
        """Tokens that were handed out."""
        self._ended = False
        self._span: CallSpan | None = None
        self._began = False
        """Whether the call is known to whoever takes spans."""

    async def next(self) -> Piece | None:
        """The next piece; None after the last. Raises `PoolTimeout`, and what went wrong."""
        while not self._ended:
            call = self._call
            if call is None:
                call = self._call = await self._begin()
                self._prepare(call)
                self._trace(call)
                self._client.submit([call])
            piece = self._next_part() or self._last_piece()
            if piece is not None:
                return piece
            if self._call is not call:
                continue  # to be begun once more
            if self._deadline.left() == 0.0:
                error = self._overdue()
                self._end_span(error)
                self.close()
                raise error
            await self._wait(call)
        return None

    def close(self) -> None:
        """Withdraw what is left of it."""
        call, self._call, self._ended = self._call, None, True
        self._end_span(None)
        if call is not None:
            self._client.let_go(call)

    # --- pieces --------------------------------------------------------------------------------

    def _next_part(self) -> Piece | None:
        """What was drawn next, if it is there, of a continuation that went on."""
        pieces = None if self._call is None else self._call.pieces
        if pieces is None or self._read == len(pieces.parts):
            return None
        part = pieces.parts[self._read]
        piece = Piece(self._number, part.token_ids, part.logprobs, part.top_logprobs)
        self._read += 1
        self._number += part.token_ids.size
        return piece

    def _last_piece(self) -> Piece | None:
        """What is left of a continuation that is there as a whole."""
        call = self._call
        if call is None or not call.done:
            return None
        try:
            whole = cast(Generation, answers_of(call)[0])
        except (PoolMismatch, UnknownAdapter) as error:
            self._call = None
            if self._number or not self._again(error):
                self._ended = True
                self._end_span(error)
                raise
            return None
        except JobExpired:  # a worker was the first to see that the time is over
            late = self._overdue(JobExpired)
            self._ended = True
            self._end_span(late)
            raise late from None
        except LmpoolError as error:
            self._ended = True
            self._end_span(error)
            raise
        self._ended = True
        try:
            self._check(call, whole)
        except LmpoolError as error:
            self._end_span(error)
            raise
        self._end_span(None)
        rest = whole.behind(self._number)
        return Piece(
            self._number,
            rest.token_ids,
            rest.logprobs,
            rest.top_logprobs,
            whole.finish_reason,
            whole.ending,
        )

    def _overdue(self, kind: type[PoolTimeout] = PoolTimeout) -> PoolTimeout:
        return self._deadline.error(
            f"the continuation had {self._number} tokens and no end",
            f"; it was withdrawn ({self._client.pool_for(self._deadline)})",
            kind,
        )

    def _check(self, call: StreamCall, whole: Generation) -> None:
        """Raise `PromptFailed` where the whole has not begun with what was handed out."""
        parts = call.pieces.parts[: self._read] if call.pieces is not None else []
        told = [token for part in parts for token in part.token_ids.tolist()]
        if whole.token_ids[: self._number].tolist() != told:
            raise PromptFailed(
                "the continuation was lost on the server and drawn anew, otherwise: what was read "
                "of it is void; ask again"
            )

    def _trace(self, call: StreamCall) -> None:
        if not self._began and active() and call.info is not None:
            self._began, pool = True, self._client.options.pool
            self._span = begin_call(pool, call.info.model, call.jobs, "lmpool stream")
        call.trace = None if self._span is None else self._span.traceparent

    def _end_span(self, error: LmpoolError | None) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end(error)

    # --- waiting -------------------------------------------------------------------------------

    def _prepare(self, call: StreamCall) -> None:
        if is_blocking():
            call.for_thread()
        else:
            call.for_loop(running_loop())

    async def _wait(self, call: StreamCall) -> None:
        """Wait until there is more, or the time is over, or for no reason."""
        left = self._deadline.left()
        if is_blocking():
            call.wait(left)
            return
        loop = running_loop()
        call.for_loop(loop)
        if call.done or call.pieces is None or self._read < len(call.pieces.parts):
            return  # it came before there was a future to be told
        wake = never_lost(loop, call._wake)
        timer = None if left is None else loop.call_later(left, wake, None)
        try:
            await call.future
        finally:
            if timer is not None:
                timer.cancel()

"""Continuations piece by piece: what `PooledLM` can tell while it is drawn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Generic

from lmpool.errors import LmpoolError, UnknownAdapter
from lmpool.keys import Priority
from lmpool.producer.answering_lm import AnsweringLM, adapter_of, as_asked
from lmpool.producer.frameworks import RowT_co
from lmpool.producer.pieces import StreamCall
from lmpool.producer.served_model import ServedModel
from lmpool.producer.stream import Piece, PieceReader
from lmpool.token_ids import TokenIds
from lmpool.wants import StopSequences, Stream
from lmpool.wire import Job


class StreamingLM(AnsweringLM[RowT_co], Generic[RowT_co]):
    """A model that a pool serves, whose continuations are read as they are drawn."""

    async def stream(
        self,
        token_ids: TokenIds,
        max_tokens: int = 20,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        stop: StopSequences = (),
        logprobs: bool = False,
        top_logprobs: int = 0,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> AsyncIterator[Piece]:
        """A continuation as `generate` draws it, in pieces of one token or more as they are drawn.

        The pieces together are the whole: see `Piece`. One that was asked for before, by the same
        seed, is there at once. `timeout` is that of the whole, from the first piece that is asked
        for to the last. Ending the loop withdraws what is left of it. Raises what `ask` raises.
        """
        want = Stream(
            max_tokens, eos_token_ids, temperature, seed,
            top_p, top_k, min_p, stop, logprobs, top_logprobs,
        )  # fmt: skip
        reader = self._piece_reader(token_ids, want, lora_name, timeout, priority)
        try:
            while (piece := await reader.next()) is not None:
                yield piece
        finally:
            reader.close()

    def _piece_reader(
        self,
        token_ids: TokenIds,
        want: Stream,
        lora_name: str | None,
        timeout: float | None,
        priority: Priority | None,
    ) -> PieceReader:
        options = self._options(timeout, priority)
        asked: list[ServedModel] = []
        before: list[Job] = []

        async def begin() -> StreamCall:
            model = await self._served((lora_name,), options)
            asked.append(model)
            adapter = adapter_of(model, lora_name)
            (prompt,) = as_asked(before, [token_ids])
            before[:] = [model.jobs.one(prompt, self._checked(model.jobs, want), adapter)]
            return StreamCall(before[0], options, model.info)

        def again(error: LmpoolError) -> bool:
            """Whether to ask anew: a pool that was replaced, and an adapter that was, once."""
            if not isinstance(error, UnknownAdapter):
                return self._client.info is not asked[-1].info
            asked[-1].adapters.forget()
            return len(asked) < 2

        return PieceReader(self._client, options.deadline, begin, again)

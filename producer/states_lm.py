"""What lies behind rows: those of every beginning of a text."""

from __future__ import annotations

from typing import Generic, cast

from lmpool.keys import Priority
from lmpool.producer.asking_lm import AskingLM
from lmpool.producer.frameworks import RowT_co
from lmpool.rows import EncodedRow
from lmpool.token_ids import TokenIds


class StatesLM(AskingLM[RowT_co], Generic[RowT_co]):
    """A model that a pool serves, asked within a text."""

    async def logprobs_at(
        self,
        token_ids: TokenIds,
        positions: TokenIds,
        lora_name: str | None = None,
        *,
        timeout: float | None = None,
        priority: Priority | None = None,
        progress: bool = False,
    ) -> RowT_co:
        """The rows after the first p tokens of a text, for each p of `positions`.

        float32 [number of positions, vocab_size], in their order; a position may come twice. Each
        is the row of a prompt, ``token_ids[:p]``, and cached as such; they are asked together, so
        that a worker that keeps what it computed takes the text in once. Raises what
        `next_token_logprobs` raises, and `PromptError` for a position that is not 1 to the length
        of the text, or of the longest prompt.
        """
        options = self._options(timeout, priority, progress)
        info, rows = await self._answers(
            lambda jobs, adapter: jobs.prefixes(
                token_ids, positions, self._checked(jobs, self._row), adapter(lora_name)
            ),
            (lora_name,),
            options,
        )
        return self._framework.stack(cast(list[EncodedRow], rows), info.vocab_size)

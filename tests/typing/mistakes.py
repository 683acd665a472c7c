# pyright: strict
"""What type checkers find before anything runs. Read by them, never run: see test_typing.py."""

from __future__ import annotations

import lmpool
from lmpool import NumpyRows, PooledLM

lmpool.connect(pool="llama", cache_byte=0)  # mistake: a misspelt option
lmpool.embedded("tiny", batchsize=16)  # mistake: a misspelt option
lmpool.connect(request_timeout="soon")  # mistake: an option of another type
lmpool.conect()  # mistake: a misspelt name


async def ask(lm: PooledLM[NumpyRows]) -> None:
    await lm.next_token_logprobs("Once upon")  # mistake: text for token ids
    lm.sync.next_token_logprobs([0.5])  # mistake: floats for token ids
    lm.next_token_logprobs([1]).max()  # mistake: no await
    lm.next_token_logprobs([1])  # mistake: no await
    (await lm.next_token_logprobs([1])).softmax(-1)  # mistake: torch's method of an array
    lm.sync.next_token_logprobs([1]).log_softmax(-1)  # mistake: torch's method of an array
    lmpool.connect().sync.next_token_logprobs([1]).astype(int)  # mistake: an array's of a tensor
    await lm.next_token_logprobs([1], temperature=1.0)  # mistake: an unknown keyword
    lm.sync.sample([1], 20, [2], timeuot=3.0)  # mistake: an unknown keyword
    lm.sample_sync([1], 20, [2], priority="urgent")  # mistake: no such priority

"""The bytes of one prompt on its way: what client and worker send, and the server answers.

Each piece is written as the protocol has it (a bulk string is its length, two line ends and
itself), with the sizes of real jobs and keys. What a batch has in common is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmpool.keys import PoolKeys
from lmpool.plan.answers import PlannedWant
from lmpool.wants import Digest
from lmpool.wire import Job, pack_job

_DIGEST = Digest(bytes(16))
_ENTRY = "1795379220798-10"
"""A stream's id."""
_KEY = len(PoolKeys("default").shard("0" * 8, 0).result(_DIGEST))
_HEX = 2 * len(_DIGEST)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one prompt's parts."""

    job: int
    """The job itself, as its stream has it."""
    claim: int
    """A client asks whether it is there, and sends the job with that."""
    deliver: int
    """The server hands the job to a worker."""
    publish: int
    """The worker writes the answer, ends the flight, acknowledges."""
    notice: int
    """The server tells the client that it is there."""
    fetch: int
    """The client asks for it."""
    answer: int
    """The server sends it."""


def traffic(want: PlannedWant, prompt_tokens: int) -> Traffic:
    """That of a prompt of so many tokens."""
    job = len(pack_job(Job(want.want, _DIGEST, bytes(4 * prompt_tokens), None, None, 1 << 40)))
    put = sum(map(bulk, (3, _KEY, want.stored, 2, 6, 2))) + len("*6\r\n") + len("+QUEUED\r\n")
    end = bulk(_HEX) + bulk(len(_ENTRY)) + bulk(2) + bulk(0) + _HEX
    return Traffic(
        job=job,
        claim=bulk(_HEX) + bulk(0) + bulk(0) + bulk(job),
        deliver=len("*2\r\n*2\r\n") + bulk(len(_ENTRY)) + bulk(3) + bulk(job),
        publish=put + end,
        notice=_HEX,
        fetch=bulk(_KEY),
        answer=bulk(want.stored),
    )


def bulk(size: int) -> int:
    """A bulk string of the protocol: ``$<size>``, a line's end, the bytes, a line's end."""
    return 1 + len(str(size)) + 2 + size + 2

"""A pool as the teacher of on-policy distillation, in the shapes of verl and of Tinker.

    python examples/integrations/teachers.py                       # a private pool, the tiny model
    python examples/integrations/teachers.py --url redis://server:6379/0 --pool llama

Needs torch, and neither verl nor Tinker.
"""

from __future__ import annotations

import argparse
import asyncio

import lmpool
from lmpool.integrations.tinker import PoolSampler
from lmpool.integrations.verl import PoolTeacher

TEXTS = ["If the file does not exist, it is created.", "Return the number of bytes."]


async def teach(lm: lmpool.PooledLM) -> None:
    """What a teacher makes of a student's sequences, all of them one request."""
    sequences = [lm.encode(text) for text in TEXTS]
    teacher = PoolTeacher(lm, topk=8)
    found = await asyncio.gather(
        *(teacher.compute_teacher_logprobs_single(ids) for ids in sequences)
    )
    for text, (ids, logprobs) in zip(TEXTS, found, strict=True):
        covered = logprobs[:-1].exp().sum(-1).mean().item()
        print(f"verl    {tuple(ids.shape)}: the likeliest 8 have {covered:.0%}  {text}")
    sampler = PoolSampler(lm)
    for text, ids in zip(TEXTS, sequences, strict=True):
        _, *rest = await sampler.compute_logprobs_async(ids)
        total = sum(each for each in rest if each is not None)
        print(f"Tinker  {total:7.2f}  {text}")


def main() -> None:
    """Teach what the command line says."""
    parser = argparse.ArgumentParser(description="A pool as a teacher.")
    parser.add_argument("--url", help="of a pool's server; without one a private pool is started")
    parser.add_argument("--pool")
    given = parser.parse_args()
    lm = lmpool.connect(given.url, given.pool) if given.url else lmpool.embedded("tiny", "hf")
    with lm:
        asyncio.run(teach(lm))


if __name__ == "__main__":
    main()

"""Checked prompts as jobs: what is wanted of each, and what its result is called."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Final

from lmpool.checks import as_integer, quoted
from lmpool.errors import PromptError
from lmpool.model_info import ModelInfo
from lmpool.producer.asks import ASKS_MOST
from lmpool.producer.prompts import prompt_bytes, several
from lmpool.token_ids import TokenIds, listed, packed_all
from lmpool.wants import Digest, Digester, Row, Want
from lmpool.wire import Job

TOGETHER: Final = 32
"""Prompts that take longer one by one than together."""


class JobMaker:
    """Makes jobs for one model; every prompt and want is checked before anything is sent."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._digester = Digester(info.fingerprint)

    def row_digest(self, row: Row, job: Job) -> Digest:
        """What the row after a job's prompt is called; `row` is a checked want."""
        return self._digester.digest(row, job.tokens, job.adapter)

    def check(self, want: Want) -> Want:
        """A want with this model's defaults. Raises `PromptError`."""
        return want.checked(self._info)

    def one(self, prompt: TokenIds, want: Want, adapter: str | None) -> Job:
        """The job of a prompt and a checked want; `adapter` is ``name@fingerprint``."""
        tokens = self._tokens(prompt, want)
        mine = want if want.repeats else want.each(1)[0]
        return Job(mine, self._digester.digest(mine, tokens, adapter), tokens, adapter)

    def many(
        self,
        prompts: Sequence[TokenIds],
        want: Want,
        adapter: str | None,
        *,
        one_seed: bool = False,
    ) -> list[Job]:
        """One job for each prompt, each with a seed of its own unless a given one is for all.

        An error names the prompt by its place.
        """
        packed = self._all_tokens(prompts, want)
        if want.repeats:
            digests = self._digester.digests(want, packed, adapter)
            return [
                Job(want, digest, tokens, adapter)
                for digest, tokens in zip(digests, packed, strict=True)
            ]
        digest_of = self._digester.digest
        wants: Sequence[Want] = want.each(len(packed))
        if one_seed:
            wants = [want.each(1)[0] for _ in packed]
        return [
            Job(mine, digest_of(mine, tokens, adapter), tokens, adapter)
            for mine, tokens in zip(wants, packed, strict=True)
        ]

    def each(self, prompts: Sequence[TokenIds], want: Want) -> list[Job | PromptError]:
        """One job for each prompt, or what is wrong with it, of prompts that were asked alone."""
        try:
            return list(self.many(prompts, want, None))
        except PromptError:
            return [self._one_or_error(prompt, want) for prompt in prompts]

    def _one_or_error(self, prompt: TokenIds, want: Want) -> Job | PromptError:
        try:
            return self.one(prompt, want, None)
        except PromptError as error:
            return error

    def prefixes(
        self, text: TokenIds, positions: TokenIds, want: Want, adapter: str | None
    ) -> list[Job]:
        """One job for the first p tokens of a text, for each p of `positions`, in their order.

        A text may be one token longer than a prompt. An error names a position by its place.
        """
        longest = self._info.max_prompt_tokens
        tokens = prompt_bytes(text, self._info.vocab_size, longest + 1)
        most = min(len(tokens) // 4, longest)
        ends = _positions(positions, most)
        parts = [tokens[: 4 * end] for end in ends]
        digests = self._digester.digests(want, parts, adapter)
        return [Job(want, d, part, adapter) for d, part in zip(digests, parts, strict=True)]

    def _all_tokens(self, prompts: Sequence[TokenIds], want: Want) -> list[bytes]:
        """Prompts of which this may be asked. Raises `PromptError`, which names the first that is
        none."""
        given = several(prompts)
        if isinstance(given, (list, tuple)) and len(given) >= TOGETHER:
            longest = want.longest_prompt(self._info.max_prompt_tokens)
            together = packed_all(given, self._info.vocab_size, longest)
            if together is not None:
                lengths = {len(tokens) // 4 for tokens in together}
                if not any(map(want.misfit_prompt, lengths)):
                    return together
        packed = []
        for number, prompt in enumerate(given):
            if number == ASKS_MOST and not isinstance(given, Sized):  # it may have no end
                raise PromptError(f"more than {ASKS_MOST} prompts in one call: ask by ask_iter")
            try:
                packed.append(self._tokens(prompt, want))
            except PromptError as error:
                raise PromptError(f"prompt {number}: {error}").of(number) from None
        return packed

    def _tokens(self, prompt: TokenIds, want: Want) -> bytes:
        """A prompt of which this may be asked. Raises `PromptError`."""
        longest = want.longest_prompt(self._info.max_prompt_tokens)
        tokens = prompt_bytes(prompt, self._info.vocab_size, longest)
        wrong = want.misfit_prompt(len(tokens) // 4)
        if wrong is not None:
            raise PromptError(wrong)
        return tokens


def _positions(given: TokenIds, most: int) -> list[int]:
    """Numbers of tokens, each 1 to `most`, of any container. Raises `PromptError`."""
    found = listed(given, ASKS_MOST, "positions", "integers")
    if len(found) > ASKS_MOST:
        raise PromptError(f"more than {ASKS_MOST} positions in one call: ask in several")
    ends = []
    for place, number in enumerate(found):
        end = as_integer(number)
        if end is None or not 1 <= end <= most:
            raise PromptError(
                f"positions[{place}]={quoted(number)}: write an integer from 1 (the row after the "
                f"first token) to {most}"
            ).of(place)
        ends.append(end)
    return ends

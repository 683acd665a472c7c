"""AWRS by draws: genlm-control's own results of the same randomness, and its law."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.backends.mock import mock_row
from tests.support.clients import connected
from tests.support.workers import in_process_worker

control = pytest.importorskip("genlm.control")
torch = pytest.importorskip("torch")

from genlm.control.potential.built_in.llm import TokenMappings  # noqa: E402
from genlm.control.sampler import token as peer  # noqa: E402

from lmpool.integrations.genlm import AWRS, PromptedLLM, awrs, next_tokens  # noqa: E402
from lmpool.integrations.genlm.next_tokens import NextTokens, Source  # noqa: E402

pytestmark = [pytest.mark.genlm, pytest.mark.server]

SIZE = 24
ENDING = [b"\x02"]
SAMPLES = 1_500


class OneOf(control.Potential):  # type: ignore[misc, name-defined]
    """Accepts contexts whose last token is one of some, and every ending that `ends` says."""

    def __init__(self, vocab: list[Any], may: Callable[[int], bool], ends: bool = True) -> None:
        super().__init__(vocab)
        self._may, self._ends = may, ends

    async def prefix(self, context: Any) -> float:
        return 0.0 if not context or self._may(context[-1].token_id) else -math.inf

    async def complete(self, context: Any) -> float:
        return 0.0 if self._ends else -math.inf


@pytest.fixture
def lm(server_url: str, pool_name: str) -> Iterator[lmpool.PooledLM[Any]]:
    with (
        in_process_worker(server_url, pool_name, engine_opts={"vocab_size": SIZE}),
        connected(server_url, pool_name, framework="torch") as lm,
    ):
        yield lm


def potential(lm: lmpool.PooledLM[Any], temperature: float = 1.0, **options: Any) -> Any:
    tokens = options.pop("tokens", SIZE)
    maps = TokenMappings.create(lm.byte_vocab[:tokens], options.pop("endings", ENDING))
    options = {"prompt_ids": [1], "temperature": temperature, "token_maps": maps, **options}
    return PromptedLLM(lm, **options)


# --- the same randomness -------------------------------------------------------------------------


class Recorded(NextTokens):
    """Keeps the order of each round."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rounds: list[list[int]] = [[]]

    async def next(self) -> int | None:
        token = await super().next()
        if token is not None:
            self.rounds[-1].append(token)
        return token

    def again(self) -> None:
        super().again()
        self.rounds.append([])


def replayed(rounds: list[list[int]]) -> Callable[[Any], Any]:
    """genlm-control's source of randomness: keys that put tokens in the order of each round."""
    left = iter(rounds)

    def keys(logps: Any) -> Any:
        order = {token: place for place, token in enumerate(next(left, []))}
        ranks = [-float(order.get(token, SIZE + token)) for token in range(SIZE)]
        return torch.where(logps == -math.inf, -math.inf, torch.tensor(ranks))

    return keys


ALGORITHMS = {
    "improper": (
        lambda tokens, accept, rng, most: awrs.first_accepted(tokens, accept, most),
        lambda args, rng, most: peer.improper_sample(max_rejects=most, **args),
    ),
    "recursive": (
        lambda tokens, accept, rng, most: awrs.recursive_awrs(tokens, accept, most),
        lambda args, rng, most: peer.recursive_awrs(max_rejects=most, **args),
    ),
    "geometric": (
        lambda tokens, accept, rng, most: awrs.geometric_awrs(tokens, accept, most, 2, rng),
        lambda args, rng, most: peer.geometric_awrs(
            max_rejects=most, max_accepts=2, rng=rng, **args
        ),
    ),
    "geometric, 5": (
        lambda tokens, accept, rng, most: awrs.geometric_awrs(tokens, accept, most, 5, rng),
        lambda args, rng, most: peer.geometric_awrs(
            max_rejects=most, max_accepts=5, rng=rng, **args
        ),
    ),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("max_rejects", [2, 4, math.inf])
def test_the_same_randomness_gives_genlms_tokens_and_weights(
    lm: lmpool.PooledLM[Any], name: str, max_rejects: float
) -> None:
    ours, theirs = ALGORITHMS[name]

    async def compare(number: int) -> tuple[Any, Any]:
        prompt, rng = [1, number % SIZE, number // SIZE], np.random.default_rng(number)
        some = rng.random(SIZE) < (0.0, 0.1, 0.5, 0.95)[number % 4]
        tokens = Recorded(Source(lm, 1.0, None, None, SIZE, [2]), prompt, rng)

        async def accept(token: int) -> bool:
            return bool(some[token])

        mine = await ours(tokens, accept, np.random.default_rng(7), max_rejects)
        logps = torch.tensor(mock_row(prompt, SIZE), dtype=torch.float64).log_softmax(0)
        args = {"logps": logps, "toks": range(SIZE), "accept": accept}
        args["make_keys"] = replayed(tokens.rounds)
        token, weight, _ = await theirs(args, np.random.default_rng(7), max_rejects)
        return mine, (token, weight)

    async def all_of_them() -> list[tuple[Any, Any]]:
        return await asyncio.gather(*map(compare, range(200)))

    results = asyncio.run(all_of_them())
    for mine, other in results:
        assert mine[0] == other[0]
        assert math.exp(mine[1]) == pytest.approx(math.exp(other[1]), rel=1e-5, abs=1e-6)
    assert sum(mine[1] > -math.inf for mine, _ in results) > 50


# --- many samples --------------------------------------------------------------------------------


def check_law(sampler: Any, context: list[Any], samples: int = SAMPLES) -> None:
    """The weighted share of each token is its weight under the target, exactly in the mean."""

    async def sample() -> tuple[list[Any], Any]:
        found = await asyncio.gather(*(sampler.sample(context) for _ in range(samples)))
        return found, await sampler.potential.logw_next(context)

    found, weights = asyncio.run(sample())
    for token in sampler.target.vocab_eos:
        exact = math.exp(float(weights[token])) if _accepted(sampler, context, token) else 0.0
        shares = np.array([math.exp(w) if t == token else 0.0 for t, w, _ in found])
        error = shares.std() / math.sqrt(samples)
        assert abs(shares.mean() - exact) < 4.5 * error + 2e-3, (token, shares.mean(), exact)


def _accepted(sampler: Any, context: list[Any], token: Any) -> bool:
    condition = sampler.condition
    if token is sampler.target.eos:
        return asyncio.run(condition.complete(context)) == 0.0
    return asyncio.run(condition.prefix([*context, token])) == 0.0


def odd(token: int) -> bool:
    return token % 2 == 1


@pytest.mark.parametrize("temperature", [0.15, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("max_accepts", [2, 4])
def test_samples_are_properly_weighted(
    lm: lmpool.PooledLM[Any], temperature: float, max_accepts: int
) -> None:
    llm = potential(lm, temperature)
    for end in (4, 9):
        sampler = AWRS(llm, OneOf(llm.vocab, odd), seed=end, max_accepts=max_accepts)
        check_law(sampler, llm.decode_tokens([3, end]))


def test_of_what_only_the_potential_knows_none_is_drawn(lm: lmpool.PooledLM[Any]) -> None:
    llm = potential(lm)
    some = [token for token in llm.vocab if token.token_id % 3]
    check_law(AWRS(llm, OneOf(some, odd), seed=1), [])
    check_law(AWRS(llm, OneOf(some, odd), seed=1, prune_logws=False), [])


def test_several_endings_are_one_token(lm: lmpool.PooledLM[Any]) -> None:
    for temperature in (0.4, 1.0):
        llm = potential(lm, temperature, endings=[b"\x02", b"\x07", b"\x09"])
        check_law(AWRS(llm, OneOf(llm.vocab, odd), seed=1), [])
        check_law(AWRS(llm, OneOf(llm.vocab, odd), seed=1, max_accepts=3), [])


def test_a_tokenizer_of_fewer_tokens_than_the_model(lm: lmpool.PooledLM[Any]) -> None:
    llm = potential(lm, 0.8, tokens=15)
    check_law(AWRS(llm, OneOf(llm.vocab, odd), seed=1), [])
    check_law(AWRS(llm, OneOf(llm.vocab[::2], lambda token: True), seed=1), [])


def test_a_proposal_is_corrected_for(lm: lmpool.PooledLM[Any]) -> None:
    llm, proposal = potential(lm), potential(lm, 1.5, prompt_ids=[8])
    check_law(AWRS(llm, OneOf(llm.vocab, odd), seed=1, proposal=proposal), [])
    maps = TokenMappings.create(lm.byte_vocab, ENDING)
    rows = control.PromptedLLM(lm, prompt_ids=[1], token_maps=maps)  # whose weights are of rows
    check_law(AWRS(rows, OneOf(rows.vocab, odd), seed=1, proposal=proposal), [])


def test_improper_samples_have_the_law_of_what_is_accepted(lm: lmpool.PooledLM[Any]) -> None:
    llm = potential(lm)
    sampler = AWRS(llm, OneOf(llm.vocab, odd, ends=False), seed=1, proper_weights=False)

    async def sample() -> list[Any]:
        return await asyncio.gather(*(sampler.sample([]) for _ in range(SAMPLES)))

    found = asyncio.run(sample())
    assert {weight for _, weight, _ in found} == {0.0}
    counts = Counter(token.token_id for token, _, _ in found)
    exact = np.exp(mock_row([1], SIZE)) * (np.arange(SIZE) % 2)
    exact /= exact.sum()
    for token, share in enumerate(exact):
        error = math.sqrt(share * (1 - share) / SAMPLES)
        assert abs(counts[token] / SAMPLES - share) < 4.5 * error + 1e-9


def test_it_weighs_as_widely_as_genlms_own(lm: lmpool.PooledLM[Any]) -> None:
    llm = potential(lm, 0.3)
    spread = []
    for kind in (AWRS, control.AWRS):
        sampler = kind(llm, OneOf(llm.vocab, lambda token: token % 3 == 0), seed=1)

        async def sample(sampler: Any = sampler) -> list[Any]:
            return await asyncio.gather(*(sampler.sample([]) for _ in range(SAMPLES)))

        spread.append(np.exp([weight for _, weight, _ in asyncio.run(sample())]))
    for of in (np.mean, np.std):
        assert of(spread[0]) == pytest.approx(of(spread[1]), abs=0.02)


def test_it_is_known_whether_one_token_is_as_likely(
    lm: lmpool.PooledLM[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_tokens, "FIRST_DRAWS", 1)

    async def compare(number: int) -> tuple[bool, bool]:
        prompt, temperature = [1, number], (0.3, 1.0)[number % 2]
        endings = ([2], [2, 7, 9, 11, 13])[number % 3 % 2]
        source = Source(lm, temperature, None, None, SIZE, endings)
        logp = math.log((0.2, 0.5)[number % 2])
        found = await NextTokens(source, prompt, np.random.default_rng(number)).peaks(logp)
        masses = np.exp(mock_row(prompt, SIZE).astype(np.float64) / temperature)
        masses[endings[0]] = masses[endings].sum()
        masses[endings[1:]] = 0.0
        return found, bool(masses.max() / masses.sum() >= math.exp(logp))

    async def all_of_them() -> list[tuple[bool, bool]]:
        return await asyncio.gather(*map(compare, range(SIZE)))

    results = asyncio.run(all_of_them())
    assert [found for found, _ in results] == [exact for _, exact in results]
    assert {exact for _, exact in results} == {True, False}


# --- as it is used -------------------------------------------------------------------------------


def test_a_seed_repeats_and_no_row_is_asked(lm: lmpool.PooledLM[Any]) -> None:
    llm = potential(lm)

    async def sample(seed: int | None) -> list[Any]:
        sampler = AWRS(llm, OneOf(llm.vocab, odd), seed=seed)
        sequences = await sampler.smc(n_particles=16, ess_threshold=0.0, max_tokens=5)
        return [sequences.contexts, sequences.log_weights.tolist()]

    first, again, other = (asyncio.run(sample(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert asyncio.run(sample(None)) != asyncio.run(sample(None))
    answers = lm.pool_statistics_sync()["answers"]
    assert answers.keys() <= {"draw", "score"}


def test_what_cannot_be_drawn_from_is_refused(lm: lmpool.PooledLM[Any]) -> None:
    llm = potential(lm)
    condition = OneOf(llm.vocab, odd)
    maps = TokenMappings.create(lm.byte_vocab, ENDING)
    for given in (llm * condition, control.PromptedLLM(lm, [1], token_maps=maps)):
        with pytest.raises(TypeError, match=r"genlm\.control\.AWRS takes any potential"):
            AWRS(given, condition)
    with pytest.raises(ValueError, match="no draw to be replaced"):
        asyncio.run(AWRS(llm, condition).sample([], draw=max))
    with pytest.raises(ValueError, match="max_accepts"):
        AWRS(llm, condition, max_accepts=1)


def test_where_fewer_tokens_are_possible_than_are_drawn(
    lm: lmpool.PooledLM[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmpool.backends.mock import engine

    row = mock_row([1], SIZE).copy()
    row[5:] = -np.inf
    row -= np.log(np.exp(row).sum())
    monkeypatch.setattr(engine, "_turned", lambda *args: row)
    llm = potential(lm)
    check_law(AWRS(llm, OneOf(llm.vocab, odd), seed=1), [], 500)
    rejecting = AWRS(llm, OneOf(llm.vocab, lambda token: False, ends=False), seed=1)
    assert asyncio.run(rejecting.sample([]))[1] == -math.inf

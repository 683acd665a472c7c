"""What a worker relies on in its engine, one test for each promise."""

from __future__ import annotations

import gc
import hashlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from lmpool.backends.contract.reference import PromptTokens, Reference, write_adapter
from lmpool.backends.engine import Engine, Outcome, Request, Sampling, Tokens
from lmpool.backends.load import load_engine
from lmpool.errors import AdapterError, EngineBroken, PromptFailed

FEATURES: Final = frozenset({"adapters", "adapter files"})
"""What an engine may lack. Without ``adapter files`` it has adapters, but reads no folder."""

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")

MEMORY_PROMPTS: Final = 5_000
MEMORY_LENGTH: Final = 4
MEMORY_WARM_UP: Final = 1_500
MEMORY_GROWTH: Final = 16 << 20

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: the name that the engine knows it by, and its folder."""

    name: str
    folder: str


def request_for(prompt: PromptTokens, **options: Any) -> Request:
    """A request with an id of its own, and ids as a worker has them: a read-only view of bytes."""
    raw = np.asarray(prompt, dtype="<u4").tobytes()
    name = hashlib.blake2b(b"%d" % next(_numbers), digest_size=16).digest()
    return Request(name, np.frombuffer(raw, dtype="<u4"), **options)


def finish(engine: Engine, requests: Sequence[Request]) -> list[Outcome]:
    """Step until nothing is in flight; the outcomes of `requests`, which were submitted before.

    Fails where one of them got none or two, or where another one's appears.
    """
    outcomes: dict[bytes, Outcome] = {}
    known = {request.id for request in requests}
    while engine.in_flight():
        for outcome in engine.step():
            assert outcome.id in known, "an outcome for a request that was never made"
            assert outcome.id not in outcomes, "a second outcome for one request"
            outcomes[outcome.id] = outcome
    assert outcomes.keys() == known, f"{len(known) - len(outcomes)} requests without an outcome"
    for outcome in outcomes.values():
        given = (outcome.row is not None) + (outcome.tokens is not None)
        assert given + (outcome.error is not None) == 1, "one of a row, tokens or an error"
    return [outcomes[request.id] for request in requests]


def ask(engine: Engine, requests: Sequence[Request]) -> list[Outcome]:
    """Submit `requests` and return their outcomes in the same order."""
    engine.submit(requests)
    return finish(engine, requests)


class EngineContract:
    """Derive from this as ``class TestMine(EngineContract)``, and pytest runs every test on it.

    The rows must be within `tolerance` (nats, float32 [vocab]) of `reference`: transformers in
    float32, unless you override it. The engine is opened with `options` by `open_engine`, and with
    `bounded` on top where a test looks at memory: options under which all that the engine keeps
    between batches is there after 1,500 prompts of 4 tokens. `lacks` maps a name of `FEATURES` to
    the reason why the engine does not have it: its tests are then reported as skipped with that
    reason, and another test sees to it that the engine refuses.

    The model needs 64 tokens of vocabulary and 48 of length at least, and a Llama's names of layers
    where the engine has adapters.
    """

    engine: ClassVar[str]
    model: ClassVar[str] = "tiny"
    options: ClassVar[Mapping[str, Any]] = {}
    bounded: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float] = 1e-4
    lacks: ClassVar[Mapping[str, str]] = {}

    served: ClassVar[Engine | None] = None

    # --- what may be overridden ----------------------------------------------------------------

    @classmethod
    def open_engine(cls, **options: Any) -> Engine:
        """A new engine."""
        return load_engine(cls.engine, cls.model, **{**cls.options, **options})

    @classmethod
    def reference(
        cls, prompts: Sequence[PromptTokens], adapter: Adapter | None = None
    ) -> npt.NDArray[np.float32]:
        """The right rows, float32 [prompts, vocab]."""
        return Reference.of(cls.model).rows(prompts, None if adapter is None else adapter.folder)

    @classmethod
    def make_adapter(cls, name: str, folder: Path, seed: int, **how: Any) -> Adapter:
        """A new adapter for the model, different for each `seed`, in `folder` / `seed`."""
        return Adapter(name, write_adapter(folder / str(seed), cls.model, seed=seed, **how))

    # --- the engine under test -----------------------------------------------------------------

    @classmethod
    def setup_class(cls) -> None:
        unknown = set(cls.lacks) - FEATURES
        assert not unknown, f"lacks={sorted(unknown)}: {sorted(FEATURES)} can be lacking"
        cls.served = None
        # Before the engine: its library may change how models are loaded in this process.
        cls.reference([[0]])

    @classmethod
    def teardown_class(cls) -> None:
        cls._close()

    @classmethod
    def _close(cls) -> None:
        served, cls.served = cls.served, None
        if served is not None:
            served.close()

    @pytest.fixture
    def opened(self) -> Engine:
        """The engine that the tests share; a new one after a test that left it running."""
        cls = type(self)
        if cls.served is not None and cls.served.in_flight():
            cls._close()
        if cls.served is None:
            cls.served = cls.open_engine()
        return cls.served

    @pytest.fixture
    def needs_adapters(self) -> None:
        if "adapters" in self.lacks:
            pytest.skip(f"the engine {self.engine} lacks adapters: {self.lacks['adapters']}")

    # --- prompts and rows ----------------------------------------------------------------------

    def mixed_prompts(self, engine: Engine, count: int, seed: int) -> list[list[int]]:
        """Prompts of every length: mostly short, some long, some of them prefixes of others."""
        random = np.random.default_rng([seed, count])
        vocab, longest = engine.info.vocab_size, engine.info.max_prompt_tokens
        prompts: list[list[int]] = []
        while len(prompts) < count:
            kind = random.random()
            if prompts and kind < 0.2:  # a relative: the beginning of another, and something else
                other = prompts[int(random.integers(len(prompts)))]
                kept = other[: int(random.integers(1, len(other) + 1))]
                added = random.integers(0, vocab, int(random.integers(0, 4)))
                prompts.append([*kept, *added.tolist()][:longest])
                continue
            bound = min(longest, 48 if kind < 0.95 else 300)
            prompts.append(random.integers(0, vocab, int(random.integers(1, bound + 1))).tolist())
        return prompts

    def check_rows(
        self,
        engine: Engine,
        prompts: Sequence[PromptTokens],
        outcomes: Sequence[Outcome],
        adapter: Adapter | None = None,
    ) -> None:
        """Each outcome has its own prompt's row."""
        expected = self.reference(prompts, adapter)
        for prompt, outcome, right in zip(prompts, outcomes, expected, strict=True):
            assert outcome.error is None, f"{outcome.error} (a prompt of {len(prompt)} tokens)"
            row = outcome.logprobs()
            assert row.dtype == np.float32
            assert row.shape == (engine.info.vocab_size,)
            worst = float(np.abs(row - right).max())
            assert worst <= self.tolerance, (
                f"off by {worst:.3g} nats, after a prompt of {len(prompt)} tokens"
            )

    def ask_rows(
        self, engine: Engine, prompts: Sequence[PromptTokens], **options: Any
    ) -> list[Outcome]:
        return ask(engine, [request_for(prompt, **options) for prompt in prompts])

    def check(self, engine: Engine, prompts: Sequence[PromptTokens]) -> None:
        """Ask for the prompts at once and compare."""
        self.check_rows(engine, prompts, self.ask_rows(engine, prompts))

    # --- what it says of itself ----------------------------------------------------------------

    def test_info_describes_the_model(self, opened: Engine) -> None:
        info = opened.info
        assert info.vocab_size == self.reference([[0]]).shape[1]
        assert info.max_prompt_tokens >= 1
        assert info.dtype in ("float32", "bfloat16", "float16")
        assert info.encoding in ("f32", "bf16")
        assert info.identity, "an identity of nothing: pools of two models would share their rows"
        special = [info.bos_token_id, info.pad_token_id, *info.eos_token_ids]
        assert all(token is None or 0 <= token < info.vocab_size for token in special)

    def test_the_vocabulary_has_the_bytes_of_tokens(self, opened: Engine) -> None:
        vocabulary = opened.byte_vocabulary()
        if vocabulary is not None:
            assert 0 < len(vocabulary) <= opened.info.vocab_size
            assert all(type(token) is bytes for token in vocabulary)
        files = opened.tokenizer_files()
        assert all(type(content) is bytes for content in files.values())

    # --- rows ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("count", [1, 7, 64, 300])
    def test_rows_of_mixed_prompts(self, opened: Engine, count: int) -> None:
        self.check(opened, self.mixed_prompts(opened, count, seed=1))

    def test_rows_are_normalized(self, opened: Engine) -> None:
        for outcome in self.ask_rows(opened, self.mixed_prompts(opened, 16, seed=2)):
            total = np.exp(outcome.logprobs().astype(np.float64)).sum()
            assert abs(total - 1) < 1e-4

    def test_repeated_prompts(self, opened: Engine) -> None:
        """Equal prompts in one batch, and again in the batches after it."""
        prompts = self.mixed_prompts(opened, 6, seed=3)
        together = [*prompts, *prompts[::-1], prompts[0], prompts[0]]
        self.check(opened, together)
        self.check(opened, prompts)
        self.check(opened, prompts[:1])
        self.check(opened, prompts[:1])

    def test_shared_prefixes(self, opened: Engine) -> None:
        random = np.random.default_rng(4)
        vocab, longest = opened.info.vocab_size, opened.info.max_prompt_tokens
        prefixes = [random.integers(0, vocab, min(n, longest // 2)).tolist() for n in (130, 130, 9)]
        prompts = [
            [*prefixes[i % 3], *random.integers(0, vocab, 1 + i % 5).tolist()] for i in range(36)
        ]
        # The same ends after different beginnings, which a cache by suffix would mistake.
        prompts += [[*prefix, 5, 6, 7] for prefix in prefixes]
        self.check(opened, prompts)
        random.shuffle(prompts)
        self.check(opened, prompts)
        self.check(opened, prefixes)

    def test_nested_prefixes(self, opened: Engine) -> None:
        random = np.random.default_rng(5)
        length = min(40, opened.info.max_prompt_tokens)
        longest = random.integers(0, opened.info.vocab_size, length).tolist()
        prompts = [longest[:n] for n in range(1, length + 1)]
        random.shuffle(prompts)
        self.check(opened, prompts)
        self.check(opened, prompts[::-1][:7])

    def test_prompts_that_grow_by_a_token(self, opened: Engine) -> None:
        """Particles: all begin alike, and each goes its own way."""
        random = np.random.default_rng(6)
        vocab = opened.info.vocab_size
        begin = random.integers(0, vocab, min(40, opened.info.max_prompt_tokens // 2)).tolist()
        particles = [list(begin) for _ in range(8)]
        for step in range(8):
            self.check(opened, particles)
            if step == 4:  # resampled: some are dropped, others go on twice
                particles = [list(particles[i]) for i in (0, 0, 0, 2, 5, 5, 7, 1)]
            for particle in particles:
                particle.append(int(random.integers(0, vocab)))

    def test_the_longest_prompt(self, opened: Engine) -> None:
        random = np.random.default_rng(7)
        vocab, longest = opened.info.vocab_size, opened.info.max_prompt_tokens
        prompts = [random.integers(0, vocab, n).tolist() for n in (longest, 1, longest, 3)]
        prompts.append(prompts[0][:-1])
        self.check(opened, prompts)
        self.check(opened, prompts[:1])

    def test_the_first_and_the_last_token_id(self, opened: Engine) -> None:
        last = opened.info.vocab_size - 1
        self.check(opened, [[0], [last], [0] * 20, [last] * 20, [last, 0]])

    def test_rows_that_were_handed_out_stay_as_they_are(self, opened: Engine) -> None:
        prompts = self.mixed_prompts(opened, 20, seed=8)
        held = self.ask_rows(opened, prompts)
        copies = [outcome.logprobs().copy() for outcome in held]
        self.ask_rows(opened, self.mixed_prompts(opened, 60, seed=9))
        for outcome, copy in zip(held, copies, strict=True):
            assert np.array_equal(outcome.logprobs(), copy)

    def test_requests_that_come_between_steps(self, opened: Engine) -> None:
        prompts = self.mixed_prompts(opened, 48, seed=10)
        requests = [request_for(prompt) for prompt in prompts]
        outcomes: dict[bytes, Outcome] = {}
        for start in range(0, 48, 12):
            opened.submit(requests[start : start + 12])
            outcomes |= {outcome.id: outcome for outcome in opened.step()}
        while opened.in_flight():
            outcomes |= {outcome.id: outcome for outcome in opened.step()}
        self.check_rows(opened, prompts, [outcomes[request.id] for request in requests])

    def test_an_idle_engine_has_nothing_to_say(self, opened: Engine) -> None:
        assert opened.in_flight() == 0
        opened.submit([])
        assert opened.in_flight() == 0
        assert list(opened.step()) == []
        opened.cancel([b"never made"])

    # --- prompts that cannot be run ------------------------------------------------------------

    @pytest.mark.parametrize("wrong", ["empty", "too long", "id", "largest id", "adapter"])
    def test_a_bad_prompt_fails_alone(self, opened: Engine, wrong: str) -> None:
        vocab, longest = opened.info.vocab_size, opened.info.max_prompt_tokens
        bad = {
            "empty": request_for([]),
            "too long": request_for([1] * (longest + 1)),
            "id": request_for([1, vocab, 1]),
            "largest id": request_for([2**32 - 1]),
            "adapter": request_for([1, 2], adapter="nobody@" + "0" * 32),
        }[wrong]
        prompts = self.mixed_prompts(opened, 6, seed=11)
        requests = [request_for(prompt) for prompt in prompts]
        requests.insert(3, bad)
        outcomes = ask(opened, requests)
        assert isinstance(outcomes.pop(3).error, PromptFailed)
        self.check_rows(opened, prompts, outcomes)
        (again,) = ask(opened, [bad])
        assert isinstance(again.error, PromptFailed)

    # --- adapters ------------------------------------------------------------------------------

    def test_an_engine_without_adapters_says_so(self, opened: Engine, tmp_path: Path) -> None:
        if "adapters" not in self.lacks:
            pytest.skip(f"the engine {self.engine} has adapters")
        with pytest.raises(AdapterError):
            opened.add_adapter(versioned("french", 1), str(tmp_path))
        self.check(opened, [[1, 2, 3]])

    @pytest.mark.usefixtures("needs_adapters")
    def test_adapters_in_one_batch(self, opened: Engine, tmp_path: Path) -> None:
        """Base and adapters of unlike ranks and layers, the same prompts for each."""
        adapters: list[Adapter | None] = [
            None,
            self.make_adapter(versioned("french", 1), tmp_path, 1, rank=4),
            self.make_adapter(
                versioned("legal", 2),
                tmp_path,
                2,
                rank=8,
                alpha=12.0,
                targets=(*ATTENTION, *MLP),
            ),
            self.make_adapter(
                versioned("rs", 3), tmp_path, 3, rank=2, alpha=2.0, targets=MLP, rslora=True
            ),
        ]
        prompts = self.mixed_prompts(opened, 12, seed=12)
        with loaded(opened, adapters):
            for _ in range(2):  # the second time out of what was kept
                self.check_mixed(opened, prompts, adapters)
        base, french = self.reference(prompts), self.reference(prompts, adapters[1])
        assert np.abs(base - french).max() > 100 * self.tolerance, "adapters that do nothing"

    @pytest.mark.usefixtures("needs_adapters")
    def test_as_many_adapters_as_a_worker_loads(self, opened: Engine, tmp_path: Path) -> None:
        adapters = [
            self.make_adapter(versioned(f"a{n}", n), tmp_path, n, rank=1 + n % 4) for n in range(32)
        ]
        with loaded(opened, adapters):
            self.check_mixed(opened, self.mixed_prompts(opened, 2, seed=13), adapters)

    def check_mixed(
        self,
        engine: Engine,
        prompts: Sequence[PromptTokens],
        adapters: Sequence[Adapter | None],
    ) -> None:
        """Ask for each prompt by each adapter, all in one batch, and compare."""
        asked = [(prompt, adapter) for prompt in prompts for adapter in adapters]
        outcomes = ask(
            engine, [request_for(p, adapter=None if a is None else a.name) for p, a in asked]
        )
        for (prompt, adapter), outcome in zip(asked, outcomes, strict=True):
            self.check_rows(engine, [prompt], [outcome], adapter)

    @pytest.mark.usefixtures("needs_adapters")
    def test_adapters_are_added_replaced_and_removed(self, opened: Engine, tmp_path: Path) -> None:
        first = self.make_adapter("x", tmp_path, 4)
        second = self.make_adapter("x", tmp_path, 5, rank=8, targets=ATTENTION)
        prompts = self.mixed_prompts(opened, 8, seed=14)
        opened.add_adapter("x", first.folder)
        self.check_rows(opened, prompts, self.ask_rows(opened, prompts, adapter="x"), first)
        opened.add_adapter("x", second.folder)
        if "adapter files" not in self.lacks:
            self.check_rows(opened, prompts, self.ask_rows(opened, prompts, adapter="x"), second)
        opened.remove_adapter("x")
        opened.remove_adapter("x")
        for _ in range(2):  # an engine that finds the folder again must not load it again
            for outcome in self.ask_rows(opened, prompts, adapter="x"):
                assert isinstance(outcome.error, PromptFailed)
        self.check(opened, prompts)
        opened.add_adapter("x", first.folder)
        self.check_rows(opened, prompts, self.ask_rows(opened, prompts, adapter="x"), first)
        opened.remove_adapter("x")

    @pytest.mark.usefixtures("needs_adapters")
    def test_an_adapter_that_goes_while_it_is_asked_for(
        self, opened: Engine, tmp_path: Path
    ) -> None:
        """Its requests get its row or an error, never another row; the others do not notice."""
        adapter = self.make_adapter("x", tmp_path, 6)
        opened.add_adapter("x", adapter.folder)
        prompts = self.mixed_prompts(opened, 12, seed=15)
        mine = [request_for(prompt, adapter="x") for prompt in prompts]
        others = [request_for(prompt) for prompt in prompts]
        opened.submit([*mine, *others])
        opened.remove_adapter("x")
        outcomes = finish(opened, [*mine, *others])
        self.check_rows(opened, prompts, outcomes[12:])
        for prompt, outcome in zip(prompts, outcomes[:12], strict=True):
            if outcome.error is None:
                self.check_rows(opened, [prompt], [outcome], adapter)
            else:
                assert isinstance(outcome.error, PromptFailed)

    @pytest.mark.usefixtures("needs_adapters")
    @pytest.mark.parametrize("wrong", ["no folder", "no json", "other model", "cut short"])
    def test_a_folder_that_holds_no_adapter_of_the_model(
        self, opened: Engine, tmp_path: Path, wrong: str
    ) -> None:
        if "adapter files" in self.lacks:
            pytest.skip(f"the engine {self.engine} reads none: {self.lacks['adapter files']}")
        folder = Path(self.make_adapter("x", tmp_path, 7).folder)
        weights = folder / "adapter_model.safetensors"
        if wrong == "no folder":
            folder = tmp_path / "nowhere"
        elif wrong == "no json":
            (folder / "adapter_config.json").write_text("{")
        elif wrong == "cut short":
            weights.write_bytes(weights.read_bytes()[:-100])
        else:
            from safetensors.numpy import load_file, save_file

            save_file({k: v[:, :-1].copy() for k, v in load_file(weights).items()}, weights)
        with pytest.raises(AdapterError):
            opened.add_adapter("x", str(folder))
        (outcome,) = self.ask_rows(opened, [[1, 2]], adapter="x")
        assert isinstance(outcome.error, PromptFailed)
        self.check(opened, [[1, 2, 3]])

    # --- sampling ------------------------------------------------------------------------------

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[PromptTokens],
        *,
        max_tokens: int = 10,
        eos: tuple[int, ...] = (),
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
        company: Sequence[Request] = (),
    ) -> list[list[int]]:
        """The prompts' continuations, drawn together with `company`."""
        requests = [
            request_for(
                prompt,
                sampling=Sampling(
                    max_tokens=max_tokens,
                    eos_token_ids=eos,
                    temperature=temperature,
                    seed=17 if seeds is None else seeds[i],
                ),
            )
            for i, prompt in enumerate(prompts)
        ]
        outcomes = ask(engine, [*requests, *company])[: len(requests)]
        continuations = []
        for outcome in outcomes:
            assert outcome.error is None, outcome.error
            assert outcome.tokens is not None, "a row, where tokens were asked for"
            assert outcome.tokens.dtype == np.uint32
            assert outcome.tokens.ndim == 1
            continuations.append(outcome.tokens.tolist())
        return continuations

    def test_greedy_takes_the_likeliest_token(self, opened: Engine) -> None:
        prompts = self.mixed_prompts(opened, 5, seed=16)
        company = [request_for(p) for p in self.mixed_prompts(opened, 9, seed=17)]
        drawn = self.sample(opened, prompts, max_tokens=8, company=company)
        for prompt, tokens in zip(prompts, drawn, strict=True):
            assert len(tokens) == 8
            rows = self.reference([[*prompt, *tokens[:n]] for n in range(8)])
            for row, token in zip(rows, tokens, strict=True):
                # A tie within the tolerance may go either way.
                assert row[token] >= row.max() - 2 * self.tolerance
        assert self.sample(opened, prompts[:1], max_tokens=8) == drawn[:1]

    def test_a_seed_repeats_alone_and_in_company(self, opened: Engine) -> None:
        prompts = self.mixed_prompts(opened, 4, seed=18)
        company = [request_for(p) for p in self.mixed_prompts(opened, 20, seed=19)]
        drawn = self.sample(opened, prompts, temperature=1.0, company=company)
        for prompt, tokens in zip(prompts, drawn, strict=True):
            assert self.sample(opened, [prompt], temperature=1.0) == [tokens]
        again = self.sample(opened, prompts[:1] * 3, temperature=1.0, seeds=[17, 18, 2**62 + 1])
        assert again[0] == drawn[0]
        assert len({tuple(tokens) for tokens in again}) > 1, "all seeds draw alike"

    def test_draws_follow_the_model(self, opened: Engine) -> None:
        """The mean log-probability of many draws is that of the model at this temperature."""
        temperature, count = 0.7, 400
        prompt = self.mixed_prompts(opened, 1, seed=20)[0]
        drawn = self.sample(
            opened, [prompt] * count, max_tokens=1, temperature=temperature, seeds=range(count)
        )
        logprobs = self.reference([prompt])[0].astype(np.float64)
        heated = logprobs / temperature - np.logaddexp.reduce(logprobs / temperature)
        weights = np.exp(heated)
        mean = float(weights @ heated)
        spread = float(np.sqrt(weights @ (heated - mean) ** 2 / count))
        found = float(np.mean([heated[tokens[0]] for tokens in drawn]))
        assert abs(found - mean) < 4 * spread, "draws of another distribution"

    def test_a_continuation_ends_before_an_end_token(self, opened: Engine) -> None:
        prompt = self.mixed_prompts(opened, 1, seed=21)[0]
        (tokens,) = self.sample(opened, [prompt], max_tokens=10, temperature=1.0)
        unused = next(t for t in range(opened.info.vocab_size) if t not in tokens)
        end = tokens[4]
        (ended,) = self.sample(opened, [prompt], max_tokens=10, temperature=1.0, eos=(unused, end))
        assert ended == tokens[: tokens.index(end)]

    def test_a_continuation_ends_where_the_model_does(self, opened: Engine) -> None:
        longest = opened.info.max_prompt_tokens
        prompt = np.random.default_rng(22).integers(0, opened.info.vocab_size, longest).tolist()
        drawn = self.sample(opened, [prompt, prompt[:-2], [1]], max_tokens=6)
        assert [len(tokens) for tokens in drawn] == [1, 3, 6]
        assert self.sample(opened, [[1], prompt], max_tokens=0) == [[], []]

    @pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
    def test_a_bad_temperature_fails_alone(self, opened: Engine, temperature: float) -> None:
        bad = request_for([1, 2], sampling=Sampling(3, (), temperature, 1))
        requests = [request_for([1, 2, 3]), bad, request_for([4])]
        outcomes = ask(opened, requests)
        assert isinstance(outcomes[1].error, PromptFailed)
        self.check_rows(opened, [[1, 2, 3], [4]], [outcomes[0], outcomes[2]])

    @pytest.mark.usefixtures("needs_adapters")
    def test_a_continuation_by_an_adapter(self, opened: Engine, tmp_path: Path) -> None:
        adapter = self.make_adapter("x", tmp_path, 8, rank=8, targets=(*ATTENTION, *MLP))
        prompt = self.mixed_prompts(opened, 1, seed=23)[0]
        with loaded(opened, [adapter]):
            sampling = Sampling(6, (), 0.0, 0)
            (outcome,) = ask(opened, [request_for(prompt, adapter="x", sampling=sampling)])
        assert outcome.tokens is not None
        rows = self.reference([[*prompt, *outcome.tokens[:n]] for n in range(6)], adapter)
        for row, token in zip(rows, outcome.tokens, strict=True):
            assert row[token] >= row.max() - 2 * self.tolerance

    # --- its life ------------------------------------------------------------------------------

    def test_cancelling_in_flight(self, opened: Engine) -> None:
        """Cancelled requests may still have an outcome; the others have their own row."""
        prompts = self.mixed_prompts(opened, 30, seed=24)
        rows = [request_for(prompt) for prompt in prompts]
        room = opened.info.max_prompt_tokens - 2
        endless = [request_for([n + 1, 1], sampling=Sampling(room, (), 1.0, n)) for n in range(4)]
        opened.submit([*rows, *endless])
        cancelled = {request.id for request in rows[::2]} | {request.id for request in endless}
        outcomes = {outcome.id: outcome for outcome in opened.step()}
        opened.cancel(cancelled)
        steps = 0
        while opened.in_flight():
            outcomes |= {outcome.id: outcome for outcome in opened.step()}
            steps += 1
        assert steps < room / 2, "continuations ran on after they were cancelled"
        kept = [
            (p, outcomes[r.id]) for p, r in zip(prompts, rows, strict=True) if r.id not in cancelled
        ]
        self.check_rows(opened, [p for p, _ in kept], [outcome for _, outcome in kept])
        # The same ids may be asked for again, and nothing of before answers them.
        self.check_rows(opened, prompts, ask(opened, rows))

    def test_state_that_is_kept_and_dropped(self, opened: Engine) -> None:
        random = np.random.default_rng(25)
        vocab, longest = opened.info.vocab_size, opened.info.max_prompt_tokens
        prefix = random.integers(0, vocab, min(100, longest // 2)).tolist()
        prompts = [prefix, [*prefix, 3], [*prefix, 3, 4], prefix[:-1], [*prefix[:-1], 9]]
        opened.cache_prefix(tokens_of(prefix))
        opened.cache_prefix(tokens_of(prefix))
        self.check(opened, prompts)
        opened.clear_cache()
        self.check(opened, prompts)
        opened.clear_cache()
        opened.clear_cache()
        self.check(opened, prompts[::-1])

    def test_state_is_dropped_in_flight(self, opened: Engine) -> None:
        prompts = self.mixed_prompts(opened, 40, seed=26)
        requests = [request_for(prompt) for prompt in prompts]
        requests.append(request_for([1], sampling=Sampling(5, (), 0.0, 0)))
        opened.submit(requests[:20])
        opened.clear_cache()
        outcomes = {outcome.id: outcome for outcome in opened.step()}
        opened.submit(requests[20:])
        opened.clear_cache()
        while opened.in_flight():
            outcomes |= {outcome.id: outcome for outcome in opened.step()}
            opened.clear_cache()
        self.check_rows(opened, prompts, [outcomes[request.id] for request in requests[:40]])

    def test_close_and_reopen_on_a_thread(self) -> None:
        """A worker opens, uses and closes its engine on a thread that is not the main one."""
        type(self)._close()
        failures: list[BaseException] = []

        def live() -> None:
            try:
                for _ in range(2):
                    engine = self.open_engine()
                    try:
                        self.check(engine, self.mixed_prompts(engine, 9, seed=27))
                    finally:
                        engine.close()
                    engine.close()
                    with pytest.raises(EngineBroken):
                        self.ask_rows(engine, [[1, 2]])
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=live, name="engine-contract")
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    def test_memory_is_flat(self) -> None:
        type(self)._close()
        engine = self.open_engine(**self.bounded)
        try:
            random = np.random.default_rng(28)
            after_warm_up = 0
            for done in range(100, MEMORY_PROMPTS + 1, 100):
                prompts = random.integers(0, engine.info.vocab_size, (100, MEMORY_LENGTH))
                outcomes = self.ask_rows(engine, prompts.tolist())
                assert all(outcome.error is None for outcome in outcomes)
                del outcomes
                if done == MEMORY_WARM_UP:
                    after_warm_up = resident_bytes()
            grown = resident_bytes() - after_warm_up
            assert grown < MEMORY_GROWTH, f"{grown / 2**20:.1f} MiB more after 3,500 prompts"
            self.check(engine, [[1, 2, 3]])
        finally:
            engine.close()


def tokens_of(prompt: PromptTokens) -> Tokens:
    """A prompt as engines take it."""
    return np.asarray(prompt, dtype=np.uint32)


def resident_bytes() -> int:
    """The memory of this process and of those that it has started."""
    gc.collect()
    process = psutil.Process()
    total: int = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def versioned(name: str, number: int) -> str:
    """An adapter's name as workers write it: with its fingerprint."""
    return f"{name}@{number:032x}"


@contextmanager
def loaded(engine: Engine, adapters: Sequence[Adapter | None]) -> Iterator[None]:
    """The adapters, loaded while the block runs."""
    there = [adapter for adapter in adapters if adapter is not None]
    for adapter in there:
        engine.add_adapter(adapter.name, adapter.folder)
    try:
        yield
    finally:
        for adapter in there:
            engine.remove_adapter(adapter.name)

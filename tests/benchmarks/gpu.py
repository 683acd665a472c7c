"""The engines on a GPU, alone and behind a pool: rows and answers, its idle time, its copies."""

from __future__ import annotations

import gc
import importlib.util
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends import Outcome, Request, load_engine
from lmpool.wants import Row, Score, Top, Want
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, progress, ratio
from tests.benchmarks.pool import Pool, Prompts, WrongRows, make_prompts
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.workers import worker_process

NAME = "gpu"
LINE = "hf and vllm on a GPU, V=128,256 in bf16: rows, answers, idle share, overlap of copies"

SECONDS: Final = 470.0
"""In which all is to be over: a part that may take longer is left out."""
PART: Final = 40.0
"""Seconds that a part may take at most."""
LOADED_IN: Final = 150.0
"""The same of loading an engine, here and in its worker."""
RESULT_TTL: Final = 5.0
"""Seconds; the rows of a few runs must fit into the server's memory."""
TOLERANCE: Final = 0.05
"""Of a row's spread: what bfloat16 may differ by between batches of other shapes."""
CHECKED: Final = 4
ALONE, POOL, BARE = "engine", "pool", "the model's forward passes alone"
BY_HAND, ONE_BY_ONE = "by hand (DynamicCache)", "by hand"
EAGER = "engine, enforce_eager"
CUDNN = "engine, cuDNN's attention"

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: a model, and how much is asked of it."""

    model: dict[str, int]
    prompts: int
    batch: int
    length: int
    text: int
    singles: int
    particles: tuple[int, int]
    """How many, and their steps."""
    kv_bytes: int


LARGE: Final = Sizes(
    # As Llama-3.2-1B is.
    {
        "vocab_size": 128_256,
        "hidden_size": 2_048,
        "intermediate_size": 8_192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4_096,
    },
    prompts=512,
    batch=64,
    length=64,
    text=512,
    singles=32,
    particles=(32, 32),
    kv_bytes=4 << 30,
)
SMALL: Final = Sizes(
    {
        "vocab_size": 2_048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    prompts=32,
    batch=16,
    length=16,
    text=32,
    singles=4,
    particles=(4, 3),
    kv_bytes=16 << 20,
)


class _Clock:
    def __init__(self) -> None:
        self._until = time.monotonic() + SECONDS

    def over(self, report: Report, part: str, takes: float = PART) -> bool:
        """Whether there is no time left for a part."""
        if time.monotonic() + takes < self._until:
            progress(f"  {part}")
            return False
        report.note(f"{part}: left out, as {SECONDS:.0f} s were all there was")
        return True


def measure(scale: Scale) -> Report:
    """The hf engine, then vLLM where it is installed. Raises `NotHere` without the device."""
    from tests.benchmarks.gpu_device import describe, find_device

    device = find_device(scale.device)
    sizes = SMALL if scale.quick or device.type == "cpu" else LARGE
    watch, clock = Bystanders(), _Clock()
    report = Report(NAME, "")
    with ExitStack() as stack:
        folder, parameters = stack.enter_context(random_llama(sizes, device))
        vocab = sizes.model["vocab_size"]
        report.title = (
            f"A Llama of {parameters / 1e6:,.0f} million random parameters in bfloat16, rows of "
            f"{vocab:,}, prompts of {sizes.length} tokens"
        )
        server = stack.enter_context(RealServer())
        found = facts(server.url, ("torch", "transformers", "vllm"))
        _Hf(folder, sizes, server, scale, report, clock).measure()
        if importlib.util.find_spec("vllm") is None:
            report.note("vLLM is not installed: left out")
        elif device.type != "cuda":
            report.note("vLLM is left out on a CPU: make bench-vllm measures it there")
        else:
            try:
                _Vllm(folder, sizes, server, scale, report, clock).measure()
            except Exception as error:  # what was found of the other is worth having
                traceback.print_exc()
                report.note(f"vLLM FAILED: {type(error).__name__}: {error}")
    report.note(
        "each run asks prompts that nobody asked before, and a sample of the rows is compared with "
        f"{BARE}; pool: Redis, one worker process on the same GPU, and a client in this process"
    )
    report.facts = {**found, **describe(device), **watch.report()}
    return report


@contextmanager
def random_llama(sizes: Sizes, device: Any) -> Iterator[tuple[str, int]]:
    """A folder with a Llama of random weights in bfloat16, and how many they are."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**sizes.model, tie_word_embeddings=True, dtype="bfloat16")
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    parameters = sum(each.numel() for each in model.parameters())
    with TemporaryDirectory(prefix="lmpool-llama-") as folder:
        model.save_pretrained(folder)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield folder, parameters


def load_alone(folder: str, device: Any) -> Any:
    """The model without an engine."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.to(device).eval()


class _Engine:
    """One engine: its figures go under headings that begin with its name."""

    NAME = ""

    def __init__(
        self,
        folder: str,
        sizes: Sizes,
        server: RealServer,
        scale: Scale,
        report: Report,
        clock: _Clock,
    ) -> None:
        from tests.benchmarks.gpu_device import find_device

        self.device = find_device(scale.device)
        self.folder = folder
        self.sizes = sizes
        self.scale = scale
        self.report = report
        self.clock = clock
        self.vocab = sizes.model["vocab_size"]
        self._server = server
        self._asked = 0
        self.engine: Any = None
        self.model: Any = None
        """The model alone, as transformers has it."""
        self._lm: Any = None

    def options(self) -> dict[str, object]:
        """The engine's own, here and in its pool."""
        raise NotImplementedError

    def measure(self) -> None:
        """Every part, as long as there is time."""
        if self.clock.over(self.report, self.NAME, LOADED_IN + PART):
            return
        with ExitStack() as stack:
            worker = stack.enter_context(
                worker_process(
                    self._server.url,
                    self.NAME,
                    alive=False,
                    engine=self.NAME,
                    model=self.folder,
                    dtype="bfloat16",
                    engine_opts=self.options(),
                    result_ttl=RESULT_TTL,
                )
            )
            self.engine = load_engine(self.NAME, self.folder, dtype="bfloat16", **self.options())
            stack.callback(self.engine.close)
            if (execution := self.engine.info.execution) is not None:
                self.report.note(f"{self.NAME}: {execution}")
            self.model = load_alone(self.folder, self.device)
            worker.wait_until_alive(LOADED_IN)
            self._lm = stack.enter_context(connected(self._server.url, self.NAME, cache_bytes=0))
            self._pool = Pool(self._lm, worker, self._server)
            self.parts()

    def parts(self) -> None:
        """What is measured of it."""
        rows = self.sides(Row(), self.sizes.prompts, self.sizes.length)
        if (bare := self.bare()) is not None:
            rows[BARE] = bare
        self.compare("rows/s", "Rows", rows)
        longest = self.longest()
        self.compare("rows/s", f"Rows of prompts of 1 to {longest} tokens", self.lengths())
        self.compare("answers/s", "Top 20", self.sides(Top(20), self.sizes.prompts, 0))
        texts = self.sides(Score(), self.sizes.prompts // 8, self.sizes.text)
        self.compare("texts/s", f"Scores of texts of {self.sizes.text} tokens", texts)
        self.compare("rows/s", "One prompt after another", self.singles())
        count, steps = self.sizes.particles
        self.compare("rows/s", f"{count} particles, {steps} steps", self.particles())
        self.idle()

    # --- paces --------------------------------------------------------------------------------

    def fresh(self, count: int, length: int) -> Prompts:
        """Prompts that nobody asked before."""
        self._asked += 1
        return make_prompts(count, self.vocab, self._asked, length=length or self.sizes.length)

    def ask_engine(self, prompts: Prompts, want: Want, batch: int | None = None) -> list[Any]:
        """Answers of the engine in this process, by batches as a worker gives them to it."""
        found: dict[bytes, Any] = {}
        batch = batch or self.sizes.batch
        for first in range(0, len(prompts), batch):
            self.engine.submit(
                [
                    Request(b"%d" % number, np.array(prompts[number], np.uint32), want=want)
                    for number in range(first, min(first + batch, len(prompts)))
                ]
            )
            while self.engine.in_flight():
                for outcome in self.engine.step():
                    if outcome.error is not None:
                        raise outcome.error
                    # As it is: to publish a row is a worker's work, and of another thread.
                    found[outcome.id] = outcome
        return [found[b"%d" % number] for number in range(len(prompts))]

    def ask_rows(self, prompts: Prompts, want: Want) -> list[Any]:
        """Rows of the engine in this process, as a caller wants them."""
        return [outcome.logprobs() for outcome in self.ask_engine(prompts, want)]

    def ask_pool(self, prompts: Prompts, want: Want) -> list[Any]:
        """Answers of the pool, all asked at once."""
        if isinstance(want, Row):
            return list(self._lm.sync.batch_next_token_logprobs(prompts))
        return list(self._lm.sync.ask_many([(prompt, want) for prompt in prompts]))

    def until_stored(
        self, ask: Callable[[Prompts, Want], list[Any]]
    ) -> AbstractContextManager[None]:
        """Wait behind some work until the pool is through with it, too, if that is asked."""
        return self._pool.until_stored() if ask == self.ask_pool else nullcontext()

    def sides(self, want: Want, count: int, size: int) -> dict[str, Callable[[int], float]]:
        """How many a second each side answers."""

        def timed(ask: Callable[[Prompts, Want], list[Any]], number: int) -> float:
            prompts = self.fresh(count, size)
            with self.until_stored(ask):
                began = time.perf_counter()
                found = ask(prompts, want)
            took = time.perf_counter() - began
            if number == 0:
                self.check(want, prompts, found)
            return count / took

        return {ALONE: partial(timed, self.ask_engine), POOL: partial(timed, self.ask_pool)}

    def longest(self) -> int:
        """Tokens that one of prompts of all lengths may have."""
        return 8 * self.sizes.length

    def lengths(self) -> dict[str, Callable[[int], float]]:
        """The same of prompts of all lengths: no two batches have the same shape."""

        def timed(ask: Callable[[Prompts, Want], list[Any]], number: int) -> float:
            count = self.sizes.prompts // 2
            prompts = self.fresh(count, self.longest())
            lengths = np.random.default_rng(self._asked).integers(1, self.longest() + 1, count)
            prompts = Prompts([p[:n] for p, n in zip(prompts, lengths.tolist(), strict=True)])
            with self.until_stored(ask):
                began = time.perf_counter()
                found = ask(prompts, Row())
            took = time.perf_counter() - began
            if number == 0:
                self.check(Row(), prompts, found)
            return count / took

        return {ALONE: partial(timed, self.ask_engine), POOL: partial(timed, self.ask_pool)}

    def singles(self) -> dict[str, Callable[[int], float]]:
        """The same of prompts of which each is asked when the row before is there."""

        def timed(ask: Callable[[Prompts, Want], list[Any]], _: int) -> float:
            prompts = self.fresh(self.sizes.singles, 0)
            with self.until_stored(ask):
                began = time.perf_counter()
                for prompt in prompts:
                    ask(Prompts([prompt]), Row())
            return len(prompts) / (time.perf_counter() - began)

        return {ALONE: partial(timed, self.ask_rows), POOL: partial(timed, self.ask_pool)}

    def particles(self) -> dict[str, Callable[[int], float]]:
        """The same of particles, each a token longer a step."""
        count, steps = self.sizes.particles

        def timed(ask: Callable[[Prompts, Want], list[Any]], _: int) -> float:
            (start,) = self.fresh(1, 4 * self.sizes.length)
            drawn = self.fresh(count, steps)
            with self.until_stored(ask):
                began = time.perf_counter()
                for step in range(1, steps + 1):
                    ask(Prompts([[*start, *particle[:step]] for particle in drawn]), Row())
            return count * steps / (time.perf_counter() - began)

        return {ALONE: partial(timed, self.ask_rows), POOL: partial(timed, self.ask_pool)}

    def compare(self, unit: str, what: str, sides: dict[str, Callable[[int], float]]) -> None:
        """The paces of each side, in turn, and how they relate."""
        heading = f"{self.NAME}: {what}"
        if self.clock.over(self.report, heading):
            return
        # Whatever is compiled, allocated or imported at first; a graph is recorded the third time.
        for side in sides.values():
            for _ in range(3 if EAGER in sides else 1):
                side(-1)
        taken = alternate(sides, self.scale.runs)
        for name, values in taken.items():
            self.report.add(heading, Measured(name, unit, tuple(values)))
        self.report.add(heading, ratio("pool / engine", taken[POOL], taken[ALONE]))
        for other in (BARE, BY_HAND, ONE_BY_ONE, EAGER, CUDNN):
            if other in taken:
                self.report.add(heading, ratio(f"engine / {other}", taken[ALONE], taken[other]))
        for other in (BY_HAND, ONE_BY_ONE):
            if other in taken:
                self.report.add(heading, ratio(f"pool / {other}", taken[POOL], taken[other]))

    def bare(self) -> Callable[[int], float] | None:
        """What no engine can beat: rows' forward passes, of which nothing is copied."""
        return None

    # --- what is right -------------------------------------------------------------------------

    def right(self, prompts: Sequence[Sequence[int]], positions: int) -> Rows:
        """Rows [prompts, positions, vocab] after the last so many tokens, by the model alone."""
        import torch

        with torch.inference_mode():
            ids = torch.tensor(prompts, device=self.device)
            logits = self.model(ids, use_cache=False, logits_to_keep=positions).logits
            rows: Rows = torch.log_softmax(logits.float(), dim=-1).cpu().numpy()
        return rows

    def check(self, want: Want, prompts: Prompts, found: Sequence[Any]) -> None:
        """Raise `WrongRows` unless a sample of the answers is near what the model alone gives."""
        for place in range(0, len(prompts), max(1, len(prompts) // CHECKED)):
            answer, prompt = found[place], prompts[place]
            if isinstance(answer, Outcome):
                answer = answer.logprobs() if isinstance(want, Row) else answer.answer
            match want:
                case Score():
                    rows = self.right([prompt[:-1]], len(prompt) - 1)[0]
                    right, answer = rows[np.arange(len(rows)), prompt[1:]], answer.logprobs
                case Top():
                    rows = self.right([prompt], 1)[0]
                    right, answer = rows[0, answer.token_ids], answer.logprobs
                case _:
                    rows = self.right([prompt], 1)[0]
                    right = rows[0]
            worst = float(np.abs(np.asarray(answer) - right).max())
            if not worst < TOLERANCE * float(np.ptp(rows)):
                raise WrongRows(f"{self.NAME}, {want.kind} {place}: differs by {worst}")

    # --- idle time -----------------------------------------------------------------------------

    def idle(self) -> None:
        """The part of the time in which the GPU had nothing to do."""
        from tests.benchmarks.gpu_device import idle_share, idle_share_of_others

        heading = f"{self.NAME}: idle share of the GPU"
        if self.clock.over(self.report, heading):
            return
        prompts = self.fresh(self.sizes.prompts, 0)
        share = idle_share(self.device, lambda: self.ask_engine(prompts, Row()))
        if share is not None:
            self.report.add(heading, Measured("engine, rows (by kernel)", "of 1", (share,)))

        def load(want: Want) -> None:
            until = time.monotonic() + self.scale.of(6, 0)
            while True:
                self.ask_pool(self.fresh(self.sizes.prompts, 0), want)
                if time.monotonic() >= until:
                    return

        for want in (Row(), Top(20)):
            found = idle_share_of_others(self.device, partial(load, want))
            if found is not None:
                figure = Measured(f"pool, {want.kind} (by NVML)", "of 1", (found[0],))
                self.report.add(heading, figure)
        self.report.note(
            "by kernel: no kernel and no copy, of CUPTI's records; by NVML: the driver's periods, "
            "in which a kernel ran at any time, so that short gaps do not show"
            if share is not None
            else f"{self.NAME}: this device does not tell when it is idle"
        )


class _Hf(_Engine):
    NAME = "hf"

    def options(self) -> dict[str, object]:
        options = {"device": str(self.device), "kv_cache_bytes": self.sizes.kv_bytes}
        # Two processes with a thread for each core would stand in each other's way.
        return {**options, "threads": 1} if self.device.type == "cpu" else options

    def parts(self) -> None:
        super().parts()
        self.copies()
        self.pinned()

    def lengths(self) -> dict[str, Callable[[int], float]]:
        sides = super().lengths()
        if self.device.type == "cuda":
            sides[CUDNN] = _with_cudnn(sides[ALONE])
        return sides

    def singles(self) -> dict[str, Callable[[int], float]]:
        sides = super().singles()
        return {**sides, EAGER: self.without_graphs(sides[ALONE]), ONE_BY_ONE: self.one_by_one}

    def particles(self) -> dict[str, Callable[[int], float]]:
        sides = super().particles()
        return {**sides, EAGER: self.without_graphs(sides[ALONE]), BY_HAND: self.particles_by_hand}

    def without_graphs(self, side: Callable[[int], float]) -> Callable[[int], float]:
        """The same of the engine as it is with `enforce_eager`."""

        packed = self.engine._packed

        def run(number: int) -> float:
            if packed is None:
                return side(number)
            graphs, packed.graphs = packed.graphs, None
            try:
                return side(number)
            finally:
                packed.graphs = graphs

        return run

    def one_by_one(self, _: int) -> float:
        """A forward pass a prompt, and its row to the host."""
        import torch

        prompts = self.fresh(self.sizes.singles, 0)
        began = time.perf_counter()
        with torch.inference_mode():
            for prompt in prompts:
                ids = torch.tensor([list(prompt)], device=self.device)
                logits = self.model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
                torch.log_softmax(logits.float(), -1).cpu()
        return len(prompts) / (time.perf_counter() - began)

    def particles_by_hand(self, _: int) -> float:
        """What one writes without an engine: a batch of them on one cache of transformers."""
        import torch
        from transformers import DynamicCache

        from lmpool.backends.hf.head import cache_name

        count, steps = self.sizes.particles
        (start,) = self.fresh(1, 4 * self.sizes.length)
        drawn = torch.tensor([list(particle) for particle in self.fresh(count, steps)])
        began = time.perf_counter()
        with torch.inference_mode():
            cache = DynamicCache()
            inputs = {cache_name(self.model): cache, "logits_to_keep": 1}
            self.model(torch.tensor([list(start)], device=self.device), **inputs)
            cache.batch_repeat_interleave(count)
            for step in range(steps):
                ids = drawn[:, step : step + 1].to(self.device)
                logits = self.model(ids, **inputs).logits[:, -1]
                torch.log_softmax(logits.float(), -1).cpu()
        return count * steps / (time.perf_counter() - began)

    def bare(self) -> Callable[[int], float]:
        import torch

        from tests.benchmarks.gpu_device import wait_for

        def run(_: int) -> float:
            prompts = self.fresh(self.sizes.prompts, 0)
            wait_for(self.device)
            began = time.perf_counter()
            with torch.inference_mode():
                for ids in torch.tensor(prompts, device=self.device).split(self.sizes.batch):
                    self.model(ids, use_cache=False, logits_to_keep=1)
            wait_for(self.device)
            return len(prompts) / (time.perf_counter() - began)

        return run

    def copies(self) -> None:
        """How much of the copying of rows ran beside a forward pass, by CUDA events."""
        from tests.benchmarks.gpu_device import (
            TimedCopies,
            Timeline,
            length,
            timed_forwards,
            together,
        )

        heading = "hf: copies of rows, by CUDA events"
        if self.clock.over(self.report, heading):
            return
        passes = self.engine._forward_tokens
        several = max(4, 4 * passes // self.sizes.length)
        cases = {
            "a pass a batch": (self.sizes.prompts, self.sizes.batch),
            "four passes a batch": (several, several),
        }
        for name, (count, batch) in cases.items():
            self.ask_engine(self.fresh(count, 0), Row(), batch)  # pinned blocks of these sizes
            found: list[tuple[float, float, float]] = []
            for _ in range(self.scale.runs):
                timeline = Timeline(self.device)
                copies = TimedCopies(self.device, timeline)
                before, self.engine._copies = self.engine._copies, copies
                try:
                    with timed_forwards(self.engine._forward._model, timeline) as marks:
                        self.ask_engine(self.fresh(count, 0), Row(), batch)
                finally:
                    self.engine._copies = before
                ran, copied = timeline.spans(marks), timeline.spans(copies.marks)
                if not all(copies.pinned) and self.device.type == "cuda":
                    self.report.note(f"{name}: rows were copied to memory that is NOT pinned")
                took = length(copied)
                beside = together(ran, copied) / took
                found.append((beside, took / length(ran), copies.nbytes / took / 1e9))
            overlaps, shares, paces = zip(*found, strict=True)
            self.report.add(
                heading,
                Measured(f"{name}: beside a forward pass", "of 1", overlaps),
                Measured(f"{name}: copying / forward passes", "times", shares),
                Measured(f"{name}: pace", "GB/s", paces),
            )

    def pinned(self) -> None:
        """What pinned memory gives, and whether its blocks are used again."""
        from tests.benchmarks.gpu_device import copying_pace, pinned_blocks

        heading = "hf: pinned memory"
        if self.device.type != "cuda" or self.clock.over(self.report, heading):
            return
        nbytes = 2 * self.vocab * self.sizes.batch
        for pinned in (True, False):
            paces = [
                copying_pace(self.device, nbytes, pinned=pinned) for _ in range(self.scale.runs)
            ]
            what = f"{nbytes / 1e6:.0f} MB to {'pinned' if pinned else 'pageable'} memory"
            self.report.add(heading, Measured(what, "GB/s", tuple(each / 1e9 for each in paces)))
        before = pinned_blocks()
        self.ask_engine(self.fresh(self.sizes.prompts, 0), Row())
        after = pinned_blocks()
        if before is not None and after is not None:
            batches = self.sizes.prompts / self.sizes.batch
            more = (after - before) / batches
            self.report.add(heading, Measured("blocks asked of CUDA", "a batch", (more,)))


def _with_cudnn(side: Callable[[int], float]) -> Callable[[int], float]:
    """The same with the attention that PyTorch prefers, and that the engine switches off."""
    import torch

    def run(number: int) -> float:
        torch.backends.cuda.enable_cudnn_sdp(True)
        try:
            return side(number)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(False)

    return run


class _Vllm(_Engine):
    NAME = "vllm"

    def options(self) -> dict[str, object]:
        return {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": self.sizes.kv_bytes}

    def bare(self) -> Callable[[int], float]:
        from tests.benchmarks.vllm import uncaptured

        def run(_: int) -> float:
            prompts = self.fresh(self.sizes.prompts, 0)
            began = time.perf_counter()
            uncaptured(self.engine, prompts)
            return len(prompts) / (time.perf_counter() - began)

        return run

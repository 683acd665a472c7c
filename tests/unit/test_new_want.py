"""Where a new want is added: one is, in a copy of the checkout.

The patch below is all that a pool needs for a want that nobody has heard of. Where only the want
itself is written, the type checker names the places that are left.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parents[2]
CHECKED = ("lmpool", "producer", "worker", "backends", "tests/support", "pyproject.toml")

Patch = dict[str, dict[str, str]]
"""By file: what is replaced, by what."""

WANT: Final[Patch] = {
    "lmpool/wants.py": {
        "Reduced: TypeAlias = Generation\n": """
@dataclass(frozen=True, slots=True)
class LikeliestToken:
    token_id: int
    nbytes: ClassVar[int] = 4


Reduced: TypeAlias = Generation | LikeliestToken
""",
        "Want: TypeAlias = Row | Generate\n": '''
@dataclass(frozen=True, slots=True)
class Likeliest:
    """The id of the likeliest next token."""

    kind: ClassVar[str] = "likeliest"
    cached: ClassVar[bool] = True

    def checked(self, info: ModelInfo) -> Likeliest:
        return self

    @property
    def repeats(self) -> bool:
        return True

    def each(self, count: int) -> Sequence[Self]:
        return (self,) * count

    def fields(self) -> list[Any]:
        return []

    @classmethod
    def from_fields(cls, fields: Sequence[Any]) -> Likeliest:
        _expect(cls.kind, fields, 0)
        return cls()

    def encode(self, computed: Computed, vocab_size: int) -> bytes:
        if not isinstance(computed.answer, LikeliestToken):
            raise PromptFailed("the engine gave no token")
        return computed.answer.token_id.to_bytes(4, "little")

    def decode(self, data: bytes, info: ModelInfo) -> LikeliestToken:
        if len(data) != 4:
            raise AnswerFormatError("no likeliest token")
        return LikeliestToken(int.from_bytes(data, "little"))


Want: TypeAlias = Row | Generate | Likeliest
''',
    },
    "producer/pooled_lm.py": {
        "Generate, Generation, Row\n": "Generate, Generation, Likeliest, LikeliestToken, Row\n",
        "    # --- sampling ---": """\
    async def likeliest(self, token_ids: TokenIds, *, timeout: float | None = None) -> int:
        _, (token,) = await self._answers(
            lambda jobs, adapter: [jobs.one(token_ids, jobs.check(Likeliest()), adapter)],
            None,
            self._options(timeout, None),
        )
        return cast(LikeliestToken, token).token_id

    # --- sampling ---""",
        "    sample = _of_sync(": """    likeliest = _of_sync(PooledLM[RowT_co].likeliest)
    sample = _of_sync(""",
    },
}
"""The want, its answer, and the public method."""

IMPORTS: Final = {"Generation, Row\n": "Generation, Likeliest, LikeliestToken, Row\n"}
REDUCED: Final = """

def _reduced(request: Request, outcome: Outcome) -> Outcome:
    if outcome.error is not None or not isinstance(request.want, Likeliest):
        return outcome
    return Outcome(outcome.id, answer=LikeliestToken(int(outcome.logprobs().argmax())))
"""

REFERENCE: Final = """

class LikeliestReference(WantReference[Likeliest]):
    def draw(
        self, random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth
    ) -> Likeliest:
        return Likeliest()

    def judge(self, answered: Sequence[Answered], truth: Truth) -> None:
        for each in answered:
            answer = each.outcome.answer
            assert isinstance(answer, LikeliestToken)
            row = truth.rows([each.asked.prompt], each.adapter)[0]
            expect(
                row[answer.token_id] >= row.max() - 2 * truth.tolerance,
                "the likeliest token is the likeliest",
                each.asked,
            )
"""

ENGINES: Final[Patch] = {
    "backends/batch.py": IMPORTS
    | {
        "                case Row():\n": "                case Row() | Likeliest():\n",
        "computed = self._attempt(rows)\n": (
            "computed = list(map(_reduced, rows, self._attempt(rows)))\n"
        ),
        "\n\ndef _generated(": REDUCED + "\n\ndef _generated(",
    },
    "backends/vllm/engine.py": IMPORTS
    | {
        "            case Row():\n": "            case Row() | Likeliest():\n",
        "    values, scale = row\n    return Outcome(": (
            "    values, scale = row\n    return _reduced(admitted.request, Outcome("
        ),
        "if values.dtype == np.uint16 else 0.0)\n": "if values.dtype == np.uint16 else 0.0))\n"
        + REDUCED,
    },
    "backends/sglang/engine.py": IMPORTS
    | {
        "import EngineInfo, Outcome\n": "import EngineInfo, Outcome, Request\n",
        "            case Row():\n": "            case Row() | Likeliest():\n",
        "Outcome.of_row(ended.request.id, row, scale)": (
            "_reduced(ended.request, Outcome.of_row(ended.request.id, row, scale))"
        ),
        "\n\nclass ": REDUCED + "\n\nclass ",
    },
    "backends/contract/wants.py": {
        "import Generate, Row, Want\n": "import Generate, Likeliest, LikeliestToken, Row, Want\n",
        "\n\nclass References:": REFERENCE + "\n\nclass References:",
        "        self._generate = GenerateReference()\n": (
            "        self._generate = GenerateReference()\n"
            "        self._likeliest = LikeliestReference()\n"
        ),
        "                return self._generate\n": (
            "                return self._generate\n"
            "            case Likeliest():\n"
            "                return self._likeliest\n"
        ),
        "        return (self._generate,)": "        return (self._generate, self._likeliest)",
    },
}
"""What the engines do for it: here they reduce a row. And what is right, for all of them."""

ASK: Final = """
import numpy as np
from lmpool.backends import Outcome, batch
from lmpool.backends.contract import EngineContract, examine
from lmpool.backends.mock import mock_row
from tests.support.clients import connected
from tests.support.fake import FakeServer
from lmpool.wants import Likeliest, LikeliestToken
from tests.support.workers import in_process_worker

with (
    FakeServer() as server,
    in_process_worker(server.url, "toy", shards=2) as worker,
    connected(server.url, "toy") as lm,
):
    for token in range(20):
        row = mock_row([token, 7], 256)
        assert lm.sync.likeliest([token, 7], timeout=20) == int(np.argmax(row))
        assert np.array_equal(lm.sync.next_token_logprobs([token, 7], timeout=20), row)
    assert lm.sync.likeliest([0, 7], timeout=20) == int(np.argmax(mock_row([0, 7], 256)))
    assert lm.statistics()["local_hits"] == 1
    assert lm.sync.pool_statistics()["computed"] == 40

class Toy(EngineContract):
    engine = "mock"
    lacks = {"adapters": "its rows are looked up without"}

    @classmethod
    def reference(cls, prompts, adapter=None):
        return np.stack([mock_row(prompt, 256) for prompt in prompts])

assert examine(Toy, parts=["life"]) is None
reduced = batch._reduced
batch._reduced = lambda request, outcome: (
    Outcome(outcome.id, answer=LikeliestToken(0))
    if isinstance(request.want, Likeliest) and outcome.error is None
    else reduced(request, outcome)
)
assert examine(Toy, parts=["life"]).promise == "the likeliest token is the likeliest"
print("answered")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what is checked and run, with what mypy knows of it already."""
    for name in (*CHECKED, ".mypy_cache"):
        source, target = ROOT / name, tmp_path / name
        if name == ".mypy_cache" and not source.exists():
            continue
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, target)
    return tmp_path


def apply(patch: Patch, checkout: Path) -> None:
    for file, changes in patch.items():
        text = (checkout / file).read_text("utf-8")
        for old, new in changes.items():
            assert text.count(old) == 1, f"{file} has not exactly one {old!r}"
            text = text.replace(old, new)
        (checkout / file).write_text(text, "utf-8")


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )


@pytest.mark.types
@pytest.mark.timeout(600)
def test_a_new_want_is_a_patch_of_six_files_of_which_the_type_checker_knows(
    checkout: Path,
) -> None:
    pytest.importorskip("mypy")
    assert len({*WANT, *ENGINES}) == 6
    apply(WANT, checkout)
    found = run(checkout, "-m", "mypy", "-p", "lmpool")
    errors = re.findall(r"^(\S+?):\d+: error: (.*)$", found.stdout, re.MULTILINE)
    # Each engine is named, for the want that it leaves out, and nothing else is.
    places = {file.removeprefix("lmpool/") for file, _ in errors}
    assert places == set(ENGINES), found.stdout + found.stderr
    assert all('"Likeliest"; expected "Never"' in error for _, error in errors), errors
    apply(ENGINES, checkout)
    found = run(checkout, "-m", "mypy", "-p", "lmpool")
    assert found.returncode == 0, found.stdout + found.stderr
    found = run(checkout, "-c", ASK)
    assert found.stdout.strip() == "answered", found.stdout + found.stderr

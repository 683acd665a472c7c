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
"""By file: what is replaced, by what; nothing, in a new one."""

LIKELIEST: Final = '''
"""The want of the likeliest token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lmpool.errors import AnswerFormatError
from lmpool.model_info import ModelInfo
from lmpool.wants import packing
from lmpool.wants.answers import LikeliestToken, Logprobs
from lmpool.wants.of_row import OfRow


@dataclass(frozen=True, slots=True)
class Likeliest(OfRow[LikeliestToken]):
    """The id of the likeliest next token."""

    kind: ClassVar[str] = "likeliest"
    answer_type: ClassVar[type[LikeliestToken]] = LikeliestToken

    def checked(self, info: ModelInfo) -> Likeliest:
        return self

    def stored_bytes(self, info: ModelInfo) -> int:
        return 4

    def fields(self) -> list[object]:
        return []

    @classmethod
    def from_fields(cls, fields: Sequence[object]) -> Likeliest:
        packing.expect(cls.kind, fields, 0)
        return cls()

    def misfit(self, vocab_size: int) -> str | None:
        return None

    def of_row(self, logprobs: Logprobs) -> LikeliestToken:
        return LikeliestToken(int(logprobs.argmax()))

    def pack(self, answer: LikeliestToken, vocab_size: int) -> bytes:
        return answer.token_id.to_bytes(4, "little")

    def decode(self, data: bytes, info: ModelInfo) -> LikeliestToken:
        if len(data) != 4:
            raise AnswerFormatError("no likeliest token")
        return LikeliestToken(int.from_bytes(data, "little"))
'''

WANT: Final[Patch] = {
    "lmpool/wants/likeliest.py": {"": LIKELIEST},
    "lmpool/wants/answers.py": {
        "Reduced: TypeAlias = Generation |": """\
@dataclass(frozen=True, slots=True)
class LikeliestToken:
    token_id: int
    nbytes: ClassVar[int] = 4


Reduced: TypeAlias = LikeliestToken | Generation |""",
        "import Any, Final": "import Any, ClassVar, Final",
    },
    "lmpool/wants/want.py": {
        "Want: TypeAlias = Row |": "Want: TypeAlias = Likeliest | Row |",
        "from lmpool.wants.row import": (
            "from lmpool.wants.likeliest import Likeliest\nfrom lmpool.wants.row import"
        ),
    },
    "lmpool/wants/__init__.py": {
        "from lmpool.wants.of_row import": (
            "from lmpool.wants.likeliest import Likeliest\nfrom lmpool.wants.of_row import"
        ),
        '    "OfRow",\n': '    "Likeliest",\n    "OfRow",\n',
    },
}
"""The want and its answer. A row answers it: every engine does, and whoever asks for any want."""

REFERENCE: Final = """

class LikeliestReference(ReducedReference[Likeliest]):
    answer_type = LikeliestToken

    def draw(
        self, random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth
    ) -> Likeliest:
        return Likeliest()

    def check(self, asked: Asked, answer: Any, row: Probabilities, within: Within) -> None:
        check_likeliest(np.array([answer.token_id], np.int32), row, within.order, asked)
"""

CONTRACT: Final[Patch] = {
    "backends/contract/reduced.py": {
        "import Tokens, Top,": "import Likeliest, Tokens, Top,",
        "from lmpool.wants import": (
            "from lmpool.wants.answers import LikeliestToken\nfrom lmpool.wants import"
        ),
        "\n\ndef given_ids(": REFERENCE + "\n\ndef given_ids(",
    },
    "backends/contract/wants.py": {
        "import TokensReference, TopReference\n": (
            "import LikeliestReference, TokensReference, TopReference\n"
        ),
        "    Hidden,\n    Row,\n": "    Hidden,\n    Likeliest,\n    Row,\n",
        "        self._top = TopReference()\n": (
            "        self._top = TopReference()\n        self._likeliest = LikeliestReference()\n"
        ),
        "            case Top():\n": (
            "            case Likeliest():\n"
            "                return self._likeliest\n"
            "            case Top():\n"
        ),
        "        return (self._top,": "        return (self._likeliest, self._top,",
    },
}
"""What is right of it, for all engines."""

ASK: Final = """
import numpy as np
from lmpool.backends import Outcome, answers, batch
from lmpool.backends.contract import EngineContract, examine
from lmpool.backends.mock import MockEngine, mock_row
from tests.support.clients import connected
from tests.support.fake import FakeServer
from lmpool.wants import Likeliest
from lmpool.wants.answers import LikeliestToken
from tests.support.workers import in_process_worker

with (
    FakeServer() as server,
    in_process_worker(server.url, "toy", shards=2) as worker,
    connected(server.url, "toy") as lm,
):
    for token in range(20):
        row = mock_row([token, 7], 256)
        found = lm.sync.ask([token, 7], Likeliest(), timeout=60)
        assert found == LikeliestToken(int(np.argmax(row)))
        assert np.array_equal(lm.sync.next_token_logprobs([token, 7], timeout=60), row)
    hits = lm.statistics()["local_hits"]
    assert lm.sync.ask([0, 7], Likeliest(), timeout=60).token_id == int(
        np.argmax(mock_row([0, 7], 256))
    )
    assert lm.statistics()["local_hits"] == hits + 1
    assert lm.sync.pool_statistics()["computed"] == 40

class Toy(EngineContract):
    engine = "mock"
    lacks = {"adapters": "its rows are looked up without"}

    @classmethod
    def reference(cls, prompts, adapter=None):
        return np.stack([mock_row(prompt, 256) for prompt in prompts])

assert examine(Toy, parts=["answers"]) is None
Likeliest.of_row = lambda self, logprobs: LikeliestToken(0)
assert examine(Toy, parts=["answers"]).promise == "the likeliest tokens come, likeliest first"
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
        place = checkout / file
        text = place.read_text("utf-8") if place.exists() else ""
        for old, new in changes.items():
            assert text.count(old) == 1 or not text, f"{file} has not exactly one {old!r}"
            text = text.replace(old, new) if old else new
        place.write_text(text, "utf-8")


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
    assert len({*WANT, *CONTRACT}) == 6
    apply(WANT, checkout)
    found = run(checkout, "-m", "mypy", "-p", "lmpool")
    errors = re.findall(r"^(\S+?):\d+: error: (.*)$", found.stdout, re.MULTILINE)
    # It is not said yet what is right of it; engines and clients need to know nothing.
    places = {file.removeprefix("lmpool/") for file, _ in errors}
    assert places == {"backends/contract/wants.py"}, found.stdout + found.stderr
    assert any('"Likeliest"; expected "Never"' in error for _, error in errors), errors
    apply(CONTRACT, checkout)
    found = run(checkout, "-m", "mypy", "-p", "lmpool")
    assert found.returncode == 0, found.stdout + found.stderr
    found = run(checkout, "-c", ASK)
    assert found.stdout.strip() == "answered", found.stdout + found.stderr

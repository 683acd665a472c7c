"""lm-evaluation-harness on a pool gets what its own `hf` gets on the same model."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import lmpool
from lmpool.errors import PromptError, SettingsError
from tests.support.lm_eval_tasks import TASKS, answers, assert_same, evaluated, flat, write_tasks
from tests.support.workers import clean_environment

lm_eval = pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from lmpool.backends import tiny  # noqa: E402
from lmpool.integrations.lm_eval import LmpoolLM, register  # noqa: E402

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore"),  # of the harness and its data sets
]

LONGEST = 512
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool(tiny_pool: lmpool.EmbeddedLM) -> lmpool.EmbeddedLM:
    return tiny_pool


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.path())
    write_tasks(folder, tokenizer, LONGEST, most=3)
    return folder


@pytest.fixture(scope="module")
def expected(tasks: Path) -> Callable[[int], Any]:
    """What the harness' own model gets, by its batch size."""
    return functools.cache(lambda size: evaluated(hf(batch_size=size), tasks))


def hf(**given: Any) -> Any:
    return HFLM(pretrained=tiny.path(), device="cpu", **given)


def request(kind: str, *arguments: Any) -> Any:
    return Instance(kind, {}, arguments, 0, metadata=("a task", 0, 1))


@pytest.mark.parametrize("size", [1, 4, 5])
def test_every_metric_and_every_answer_is_that_of_hf(
    pool: lmpool.EmbeddedLM, tasks: Path, expected: Callable[[int], Any], size: int
) -> None:
    found = evaluated(LmpoolLM(pool, batch_size=size), tasks)
    assert_same(found, expected(size))
    greedy = {flat(each)[-1] for each in answers(found)["lmpool_words"]}
    assert greedy == {True, False}  # what is compared is both


def test_with_a_shorter_max_length_and_an_adapterless_prefix(
    pool: lmpool.EmbeddedLM, tasks: Path
) -> None:
    given = {"max_length": 40, "add_bos_token": False, "prefix_token_id": 2}
    assert_same(evaluated(LmpoolLM(pool, **given), tasks), evaluated(hf(**given), tasks))


def test_three_evaluations_at_once(
    pool: lmpool.EmbeddedLM, tasks: Path, expected: Callable[[int], Any]
) -> None:
    """Each with a client of its own."""

    def evaluate(size: int) -> Any:
        model = LmpoolLM(url=pool.url, pool=pool.pool, batch_size=size)
        try:
            return evaluated(model, tasks)
        finally:
            model._lm.close()

    with ThreadPoolExecutor(3) as threads:
        for size, found in zip((1, 4, 5), threads.map(evaluate, (1, 4, 5)), strict=True):
            assert_same(found, expected(size))


def test_the_launcher(
    pool: lmpool.EmbeddedLM, tasks: Path, expected: Callable[[int], Any], tmp_path: Path
) -> None:
    """The command that works with a harness that reads no entry points."""
    command = [
        sys.executable, "-m", "lmpool.integrations.lm_eval", "run", "--model", "lmpool",
        "--tasks", *TASKS, "--include_path", str(tasks), "--log_samples", "--batch_size", "4",
        "--output_path", str(tmp_path),
    ]  # fmt: skip
    environment = {
        **clean_environment(),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "HF_HUB_OFFLINE": "1",
        "LMPOOL_URL": pool.url,
        "LMPOOL_POOL": pool.pool,
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (file,) = tmp_path.rglob("results_*.json")
    found = json.loads(file.read_text("utf-8"))
    found["samples"] = {}
    for task in TASKS:
        (samples,) = file.parent.glob(f"samples_{task}_*.jsonl")
        found["samples"][task] = [*map(json.loads, samples.read_text("utf-8").splitlines())]
    assert_same(found, expected(4))


def test_the_entry_point_is_the_class() -> None:
    (found,) = entry_points(group="lm_eval.models", name="lmpool")
    assert found.load() is LmpoolLM
    register()
    register()
    assert get_model("lmpool") is LmpoolLM
    assert get_model("hf") is HFLM  # the others are known as before


def test_tokens_are_those_of_hf(pool: lmpool.EmbeddedLM) -> None:
    ours, theirs = LmpoolLM(pool), hf()
    assert ours.max_length == theirs.max_length == LONGEST
    assert ours.prefix_token_id == theirs.prefix_token_id == pool.info.bos_token_id
    assert ours.eot_token_id == theirs.eot_token_id
    for text in ("Return", "<s>Return", "", "naïve"):
        for special in (None, True, False):
            mine = ours.tok_encode(text, add_special_tokens=special)
            assert mine == theirs.tok_encode(text, add_special_tokens=special)
    assert ours.tok_encode("<s>Return").count(1) == 1
    assert pool.info.fingerprint8 in ours.tokenizer_name


def test_a_text_has_one_token_more_than_the_model_takes(pool: lmpool.EmbeddedLM) -> None:
    lm = LmpoolLM(pool)
    ids, start = lm._text([5] * LONGEST, [7])
    assert (len(ids), start) == (LONGEST + 1, LONGEST)
    ids, start = lm._text([5] * 2 * LONGEST, [7] * LONGEST)
    assert (len(ids), start) == (LONGEST + 1, 1)


def test_a_notebook_s_loop_may_run(pool: lmpool.EmbeddedLM) -> None:
    lm = LmpoolLM(pool)
    asked = [request("generate_until", "Return the", {"until": ["."], "max_gen_toks": 8})]

    async def in_a_loop() -> list[str]:
        return lm.generate_until(asked, disable_tqdm=True)

    assert asyncio.run(in_a_loop()) == lm.generate_until(asked, disable_tqdm=True)


def test_drawn_texts_repeat_by_their_seed_and_differ_by_request(
    pool: lmpool.EmbeddedLM,
) -> None:
    given = {"do_sample": True, "temperature": 1.0, "until": [], "max_gen_toks": 12}
    asked = [request("generate_until", "Return the", given) for _ in range(6)]
    first = LmpoolLM(pool).generate_until(asked, disable_tqdm=True)
    assert first == LmpoolLM(pool).generate_until(asked, disable_tqdm=True)
    assert len(set(first)) > 1
    assert first != LmpoolLM(pool, seed=7).generate_until(asked, disable_tqdm=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_length": 513}, "max_length=513: write an integer from 1 to 512"),
        ({"max_length": "long"}, "max_length='long'"),
        ({"in_flight": 0}, "in_flight=0"),
        ({"url": "redis://elsewhere"}, "beside lm"),
        ({"request_timeout": 3}, "request_timeout beside lm"),
    ],
)
def test_what_cannot_be_is_refused(
    pool: lmpool.EmbeddedLM, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(PromptError, match=said):
        LmpoolLM(pool, **given)


def test_a_setting_that_is_none_is_refused() -> None:
    with pytest.raises(SettingsError, match="pretrained"):
        LmpoolLM(pretrained="gpt2")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"max_gen_toks": 512}, "max_gen_toks=512"),
        ({"until": [3]}, "stop="),
    ],
)
def test_what_a_pool_does_not_draw_is_refused(
    pool: lmpool.EmbeddedLM, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(PromptError, match=said):
        LmpoolLM(pool).generate_until([request("generate_until", "Return", given)])


def test_an_empty_continuation_is_refused(pool: lmpool.EmbeddedLM) -> None:
    with pytest.raises(PromptError, match="a continuation of 0"):
        LmpoolLM(pool)._loglikelihood_tokens([(None, [1, 2], [])])

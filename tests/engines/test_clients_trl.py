"""TRL on a pool, without HTTP: its client's methods, and the losses of a real trainer."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.errors import PromptError
from lmpool.wants import Generate

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from trl.generation import vllm_client  # noqa: E402

from lmpool.backends import tiny  # noqa: E402
from lmpool.integrations.trl import PoolClient, pool_as_server  # noqa: E402
from tests.support.distillation import ExactTeacher, losses  # noqa: E402

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore"),  # of TRL and what it brings
]

PROMPTS = ["If the file does not", "Return the number of"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def pool(tiny_pool: lmpool.EmbeddedLM) -> lmpool.EmbeddedLM:
    return tiny_pool


@pytest.fixture(scope="module")
def client(pool: lmpool.EmbeddedLM) -> PoolClient:
    return PoolClient(pool)


def test_it_has_every_method_of_trls_client_with_its_arguments() -> None:
    for name, theirs in inspect.getmembers(vllm_client.VLLMClient, inspect.isfunction):
        if name.startswith("_"):
            continue
        wanted = inspect.signature(theirs).parameters
        given = inspect.signature(getattr(PoolClient, name)).parameters
        assert list(given) == list(wanted), name
        for argument in wanted:
            if argument != "max_concurrent_requests":
                assert given[argument].default == wanted[argument].default, (name, argument)


# --- the teacher -----------------------------------------------------------------------------


def test_sequences_have_the_log_probabilities_of_exact_rows(
    pool: lmpool.EmbeddedLM, client: PoolClient
) -> None:
    random = np.random.default_rng(3)
    sequences = [random.integers(3, 2000, size).tolist() for size in (12, 40, 5, 1, 513)]
    starts = [4, 0, 5, 0, 500]
    found = client.get_sequence_logprobs(sequences, starts, top_logprobs=7)
    exact = ExactTeacher().get_sequence_logprobs(sequences, starts, top_logprobs=7)
    assert found.keys() == exact.keys()
    for mine, theirs in zip(found["logprob_token_ids"], exact["logprob_token_ids"], strict=True):
        assert mine == theirs
    assert found["actual_token_ids"] == exact["actual_token_ids"]
    for name in ("logprobs", "actual_logprobs"):
        for mine, theirs in zip(found[name], exact[name], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)
    assert found["actual_logprobs"][1][0] == [-math.inf]  # nothing stands before position 0
    assert found["logprobs"][2] == []  # of a completion without tokens


def test_the_likeliest_of_a_whole_vocabulary_and_beyond(
    pool: lmpool.EmbeddedLM, client: PoolClient
) -> None:
    found = client.get_sequence_logprobs([[1, 5, 9]], [2], top_logprobs=2003)
    (row,) = found["logprobs"][0]
    assert len(row) == 2003
    assert row[2000:] == [-math.inf] * 3
    assert abs(np.logaddexp.reduce(row)) < 1e-5
    assert row == sorted(row, reverse=True)


def test_the_temperature_is_vllms_unless_it_is_to_be_applied(pool: lmpool.EmbeddedLM) -> None:
    asked = ([[1, 5, 9, 4]], [2], 5, 0.7)
    plain = PoolClient(pool).get_sequence_logprobs(*asked)
    assert plain == PoolClient(pool).get_sequence_logprobs(*asked[:3])
    warm = PoolClient(pool, apply_temperature=True).get_sequence_logprobs(*asked)
    row = np.asarray(pool.sync.next_token_logprobs([1, 5]), np.float64) / 0.7
    expected = np.sort(row - np.logaddexp.reduce(row))[::-1][:5]
    np.testing.assert_allclose(warm["logprobs"][0][0], expected, atol=5e-5)


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({"beta": 0.0, "loss_top_k": 20}, 1.0),
        ({"beta": 0.0, "loss_top_k": 100, "loss_add_tail": False}, 1.0),
        ({"beta": 0.5, "loss_top_k": 1}, 0.8),
        ({"beta": 1.0, "loss_top_k": 1}, 1.0),
    ],
)
def test_a_trainers_losses_are_those_of_exact_rows(
    pool: lmpool.EmbeddedLM, tmp_path: Path, options: dict[str, Any], temperature: float
) -> None:
    options = {**options, "temperature": temperature}
    with pool_as_server(pool) as client:
        found = losses(tmp_path / "pool", **options)
    assert isinstance(client, PoolClient)
    exact = losses(tmp_path / "exact", teacher=ExactTeacher(), **options)
    assert len(found) == len(exact) == 2
    assert all(math.isfinite(loss) and loss > 1e-4 for loss in exact)
    np.testing.assert_allclose(found, exact, atol=5e-5, rtol=0)


def test_outside_the_with_trls_client_is_its_own(pool: lmpool.EmbeddedLM) -> None:
    theirs = vllm_client.VLLMClient
    with pool_as_server(pool):
        assert vllm_client.VLLMClient is not theirs
    assert vllm_client.VLLMClient is theirs


# --- completions -----------------------------------------------------------------------------


def test_completions_are_the_pools(pool: lmpool.EmbeddedLM, client: PoolClient) -> None:
    found = client.generate(
        PROMPTS, n=2, max_tokens=6, top_k=50, logprobs=2, generation_kwargs={"seed": 3}
    )
    ids = [pool.encode(text) for text in PROMPTS]
    assert found["prompt_ids"] == ids
    for number, completion in enumerate(found["completion_ids"]):
        want = Generate(6, seed=3 + number, top_k=50, logprobs=True, top_logprobs=2)
        whole = pool.sync.ask(ids[number // 2], want)
        assert completion == whole.token_ids.tolist()
        assert whole.logprobs is not None
        assert whole.top_logprobs is not None
        for at, token in enumerate(completion):
            values = found["logprobs"][number][at]
            tokens = found["logprob_token_ids"][number][at]
            assert values == sorted(values, reverse=True)
            assert set(tokens) == {token, *whole.top_logprobs.token_ids[at].tolist()}
            assert values[tokens.index(token)] == whole.logprobs[at]
    given = client.generate(ids, max_tokens=3, temperature=0.0, logprobs=None)
    assert given["logprobs"] is None
    assert given["logprob_token_ids"] is None
    alone = client.generate(ids, max_tokens=3, temperature=0.0)
    assert alone["completion_ids"] == given["completion_ids"]
    assert [[len(each) for each in row] for row in alone["logprobs"]] == [[1] * 3] * 2


def test_a_text_that_ends_it(pool: lmpool.EmbeddedLM, client: PoolClient) -> None:
    ids = [pool.encode(text) for text in PROMPTS]
    whole = [pool.sync.generate(each, 30, 0.0).token_ids.tolist() for each in ids]
    stop = pool.decode(whole[0])[4:8]
    found = client.generate(ids, max_tokens=30, temperature=0.0, generation_kwargs={"stop": stop})
    first = found["completion_ids"][0]
    assert stop in pool.decode(first)
    assert stop not in pool.decode(first[:-1])
    assert first == whole[0][: len(first)]
    ended = client.generate(
        ids, max_tokens=30, temperature=0.0, generation_kwargs={"stop_token_ids": [whole[0][2]]}
    )
    assert ended["completion_ids"][0] == whole[0][:3]


def test_conversations(pool: lmpool.EmbeddedLM, client: PoolClient) -> None:
    messages = [[{"role": "user", "content": "Return what?"}], [{"role": "user", "content": "x"}]]
    found = client.chat(messages, max_tokens=4, temperature=0.0, chat_template=TEMPLATE)
    ids = [pool.encode(f"[user] {each[0]['content']}\n[assistant]", bos=False) for each in messages]
    assert found["prompt_ids"] == ids
    assert found["completion_ids"] == [
        pool.sync.generate(each, 4, 0.0).token_ids.tolist() for each in ids
    ]
    with pytest.raises(PromptError, match="no chat template: give chat_template"):
        client.chat(messages)
    picture = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(PromptError, match="no text"):
        client.chat([picture], chat_template=TEMPLATE)


# --- what it refuses -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"structured_outputs_regex": "a+"}, "structured_outputs_regex='a\\+'"),
        ({"generation_kwargs": {"frequency_penalty": 1}}, "frequency_penalty=1"),
        ({"generation_kwargs": {"guided_json": {}}}, "guided_json"),
        ({"n": 0}, "n=0"),
    ],
)
def test_what_a_pool_does_not_draw_by_is_refused(
    client: PoolClient, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(PromptError, match=said):
        client.generate([[1, 5]], **given)


def test_what_cannot_be_scored_is_refused(client: PoolClient) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        client.get_sequence_logprobs([[1, 2]], [1], temperature=0)
    with pytest.raises(PromptError, match=r"prompt_lengths\[0\]=3"):
        client.get_sequence_logprobs([[1, 2]], [3])
    with pytest.raises(PromptError, match="1 sequences and 2 prompt_lengths"):
        client.get_sequence_logprobs([[1, 2]], [1, 1])
    with pytest.raises(PromptError, match="ask 1"):
        client.get_sequence_logprobs([[1, 2], [5] * 514], [1, 1])


def test_a_pool_is_looked_at_once_where_no_time_is_given(client: PoolClient) -> None:
    client.check_server()
    client.check_server(0.0)


def test_weights_stay_as_they_are(pool: lmpool.EmbeddedLM, client: PoolClient) -> None:
    client.check_server(10)
    client.reset_prefix_cache()
    client.close_communicator()
    assert client.get_server_info()["weight_transfer_config"] is None
    assert client.image_features([None, None]) == [None, None]
    for call in (
        client.init_communicator,
        client.get_world_size,
        client.weight_update,
        lambda: client.update_named_param("x", None),
        lambda: client.update_named_params([], iter([])),
        lambda: client.update_model_params(None),
    ):
        with pytest.raises(NotImplementedError, match="LoRA adapter"):
            call()
    with pytest.raises(PromptError, match="images"):
        client.image_features(["a picture"])
    with pytest.raises(TypeError, match="a PooledLM is needed, not str"):
        PoolClient("redis://server")  # type: ignore[arg-type]
    assert tiny.path()

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis

from lmpool.backends.engine import EngineInfo
from lmpool.backends.mock import MockEngine
from lmpool.errors import PoolMismatch, SettingsError
from lmpool.keys import PoolKeys, Priority
from lmpool.liveness import LIFE_MS
from lmpool.model_info import ModelInfo
from lmpool.servers import Servers
from lmpool.settings import WorkerOptions
from lmpool.vocabulary import Vocabulary
from lmpool.worker.intake import create_groups
from lmpool.worker.membership import (
    batch_budget,
    join,
    model_info,
    publish_vocabulary,
    usual_places,
)

ENGINE = EngineInfo(
    engine="hf",
    model="org/model",
    revision="abc",
    vocab_size=1000,
    max_prompt_tokens=2048,
    dtype="bfloat16",
    encoding="bf16",
    identity={"files": "0123"},
    bos_token_id=1,
    eos_token_ids=(2, 3),
    pad_token_id=0,
)


def options(**given: Any) -> WorkerOptions:
    return WorkerOptions(**given)


# --- what a worker serves ----------------------------------------------------------------------


def test_model_info_is_the_engines_and_the_settings() -> None:
    info = model_info(ENGINE, options(shards=3, max_backlog=50, result_ttl=1.5))
    assert info == ModelInfo(
        model="org/model",
        revision="abc",
        fingerprint=info.fingerprint,
        vocab_size=1000,
        max_prompt_tokens=2048,
        dtype="bfloat16",
        engine="hf",
        encoding="bf16",
        bos_token_id=1,
        eos_token_ids=(2, 3),
        pad_token_id=0,
        shards=3,
        lanes=64,
        max_backlog=50,
        result_ttl_ms=1500,
        no_head="its engine gives none",
    )


def test_the_fingerprint_follows_what_changes_the_numbers_and_nothing_else() -> None:
    base = model_info(ENGINE, options()).fingerprint
    for changed in (
        {"engine": "vllm"},
        {"dtype": "float32"},
        {"vocab_size": 1001},
        {"identity": {"files": "4567"}},
        {"identity": {}},
    ):
        assert model_info(replace(ENGINE, **changed), options()).fingerprint != base, changed
    for same in ({"model": "copy/of-it"}, {"max_prompt_tokens": 10}, {"encoding": "f32"}):
        assert model_info(replace(ENGINE, **same), options()).fingerprint == base, same
    assert model_info(ENGINE, options(shards=2, max_backlog=3)).fingerprint == base


def test_a_longest_prompt_beyond_the_models_is_refused() -> None:
    assert model_info(ENGINE, options(max_prompt_tokens=100)).max_prompt_tokens == 100
    with pytest.raises(SettingsError, match=r"max_prompt_tokens=4096.*takes at most 2048") as told:
        model_info(ENGINE, options(max_prompt_tokens=4096))
    assert "write 2048 or less" in str(told.value)


def test_the_budget_of_a_batch_holds_the_longest_prompt() -> None:
    info = model_info(ENGINE, options())
    assert batch_budget(options(), info) == 16_384
    assert batch_budget(options(), replace(info, max_prompt_tokens=100_000)) == 100_000
    assert batch_budget(options(max_batch_tokens=2048), info) == 2048
    with pytest.raises(SettingsError, match="max_batch_tokens=2047 is below the longest prompt"):
        batch_budget(options(max_batch_tokens=2047), info)


# --- joining -----------------------------------------------------------------------------------

INFO = model_info(ENGINE, WorkerOptions())
OTHER = model_info(replace(ENGINE, model="org/other", identity={"files": "9"}), WorkerOptions())


@pytest.fixture
def keys(pool_name: str, any_server: str) -> PoolKeys:
    return PoolKeys(pool_name)


def served(server: redis.Redis, keys: PoolKeys) -> ModelInfo:
    packed: Any = server.get(keys.info)
    return ModelInfo.unpack(packed)


def appear(server: redis.Redis, keys: PoolKeys, info: ModelInfo, consumer: str = "w") -> None:
    """As a living worker."""
    shards = info.shard_keys(keys)
    create_groups(Servers(lambda: server), shards, consumer)  # type: ignore[arg-type,return-value]
    server.set(shards[0].alive(consumer), b"", px=LIFE_MS)
    server.set(keys.serving, info.mark(), px=LIFE_MS)


def test_the_first_worker_makes_the_pool(redis_client: redis.Redis, keys: PoolKeys) -> None:
    join(Servers(lambda: redis_client), keys, INFO, False, 5000)  # type: ignore[arg-type]
    assert served(redis_client, keys) == INFO


def test_the_same_model_joins(redis_client: redis.Redis, keys: PoolKeys) -> None:
    join(Servers(lambda: redis_client), keys, INFO, False, 5000)  # type: ignore[arg-type]
    appear(redis_client, keys, INFO)
    # Where workers may differ, the latest decides.
    latest = replace(INFO, model="local/copy", revision=None, max_backlog=5, result_ttl_ms=7)
    join(Servers(lambda: redis_client), keys, latest, False, 5000)  # type: ignore[arg-type]
    assert served(redis_client, keys) == latest


@pytest.mark.parametrize(
    "changed",
    [
        {"fingerprint": "f" * 32},
        {"vocab_size": 999},
        {"max_prompt_tokens": 1024},
        {"dtype": "float32"},
        {"engine": "vllm"},
        {"encoding": "f32"},
        {"shards": 2},
        {"lanes": 2},
        {"protocols": (2, 3)},
        {"bos_token_id": None},
        {"eos_token_ids": (2,)},
        {"pad_token_id": 7},
    ],
    ids=str,
)
def test_another_model_is_refused_while_workers_live(
    changed: dict[str, Any], redis_client: redis.Redis, keys: PoolKeys
) -> None:
    join(Servers(lambda: redis_client), keys, INFO, False, 5000)  # type: ignore[arg-type]
    appear(redis_client, keys, INFO)
    (name,) = changed
    with pytest.raises(PoolMismatch) as refused:
        join(Servers(lambda: redis_client), keys, replace(INFO, **changed), False, 5000)  # type: ignore[arg-type]
    message = str(refused.value)
    assert f"{name} {getattr(INFO, name)!r} there, {changed[name]!r} here" in message
    assert "LMPOOL_REPLACE=1" in message
    assert served(redis_client, keys) == INFO


def test_another_model_takes_over_from_the_dead(redis_client: redis.Redis, keys: PoolKeys) -> None:
    join(Servers(lambda: redis_client), keys, INFO, False, 5000)  # type: ignore[arg-type]
    appear(redis_client, keys, INFO)
    redis_client.delete(keys.serving)
    join(Servers(lambda: redis_client), keys, OTHER, False, 5000)  # type: ignore[arg-type]
    assert served(redis_client, keys) == OTHER


def test_another_model_takes_over_when_it_is_told_to(
    redis_client: redis.Redis, keys: PoolKeys
) -> None:
    join(Servers(lambda: redis_client), keys, INFO, False, 5000)  # type: ignore[arg-type]
    appear(redis_client, keys, INFO)
    join(Servers(lambda: redis_client), keys, OTHER, True, 5000)  # type: ignore[arg-type]
    assert served(redis_client, keys) == OTHER


def test_what_cannot_be_read_is_not_overwritten_unasked(
    redis_client: redis.Redis, keys: PoolKeys
) -> None:
    redis_client.set(keys.info, b"from the future")
    redis_client.set(keys.serving, b"as its workers say", px=LIFE_MS)
    with pytest.raises(PoolMismatch, match=r"cannot read .*LMPOOL_REPLACE=1"):
        join(Servers(lambda: redis_client), keys, INFO, False, 5000)  # type: ignore[arg-type]
    assert redis_client.get(keys.info) == b"from the future"
    join(Servers(lambda: redis_client), keys, INFO, True, 5000)  # type: ignore[arg-type]
    assert served(redis_client, keys) == INFO


def test_what_cannot_be_read_and_nobody_serves_is_taken_over(
    redis_client: redis.Redis, keys: PoolKeys
) -> None:
    """An upgrade after all workers have left needs no more than their start."""
    redis_client.set(keys.info, b"of an older release")
    join(Servers(lambda: redis_client), keys, INFO, False, 5000)  # type: ignore[arg-type]
    assert served(redis_client, keys) == INFO


def test_two_that_join_at_once_see_each_other(
    redis_client: redis.Redis, keys: PoolKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = redis_client.get
    rivals = [OTHER]

    def get_and_be_overtaken(name: str) -> Any:
        found = get(name)
        if rivals:
            rival = rivals.pop()
            redis_client.set(keys.info, rival.pack())
            appear(redis_client, keys, rival)
        return found

    monkeypatch.setattr(redis_client, "get", get_and_be_overtaken)
    with pytest.raises(PoolMismatch, match="org/other"):
        join(Servers(lambda: redis_client), keys, INFO, False, 5000)  # type: ignore[arg-type]
    assert served(redis_client, keys) == OTHER


@pytest.mark.parametrize("life", ["longer", "none"])
def test_a_pool_whose_workers_died_is_nobodys_whatever_life_their_word_has(
    life: str, redis_client: redis.Redis, keys: PoolKeys
) -> None:
    """The clock was set back, or keys were restored without their lives."""
    join(Servers(lambda: redis_client), keys, OTHER, False, LIFE_MS)  # type: ignore[arg-type]
    if life == "none":
        redis_client.persist(keys.serving)
    else:
        redis_client.pexpire(keys.serving, LIFE_MS + 3_600_000)
    join(Servers(lambda: redis_client), keys, INFO, False, LIFE_MS)  # type: ignore[arg-type]
    assert served(redis_client, keys) == INFO


@pytest.mark.parametrize("priority", ["interactive", "batch"])
@pytest.mark.parametrize("lane", [0, 1])
def test_what_nobody_serves_any_more_ends_and_what_is_served_again_stays(
    priority: Priority, lane: int, redis_client: redis.Redis, keys: PoolKeys
) -> None:
    def ends(info: ModelInfo) -> list[bool]:
        names = (shard.stream(priority, lane).key for shard in info.shard_keys(keys))
        return [redis_client.pttl(name) > 0 for name in names]  # type: ignore[operator]

    narrow, other = replace(INFO, lanes=2), replace(OTHER, lanes=2)
    wide = replace(narrow, shards=3)
    for info in (wide, other):
        for shard in info.shard_keys(keys):
            redis_client.xadd(shard.stream(priority, lane).key, {"job": b""})
    join(Servers(lambda: redis_client), keys, wide, False, 5000)  # type: ignore[arg-type]
    assert ends(wide) == [False, False, False]
    join(Servers(lambda: redis_client), keys, other, True, 5000)  # type: ignore[arg-type]
    assert (ends(wide), ends(other)) == ([True, True, True], [False])
    join(Servers(lambda: redis_client), keys, wide, True, 5000)  # type: ignore[arg-type]
    assert (ends(wide), ends(other)) == ([False, False, False], [True])
    join(Servers(lambda: redis_client), keys, narrow, True, 5000)  # type: ignore[arg-type]
    assert ends(wide) == [True, True, True]  # the same model in fewer shards: others by name


# --- the vocabulary ----------------------------------------------------------------------------


def test_the_vocabulary_is_published_once(redis_client: redis.Redis, keys: PoolKeys) -> None:
    engine = MockEngine()
    info = model_info(engine.info, WorkerOptions())
    publish_vocabulary(Servers(lambda: redis_client), keys, info, engine)  # type: ignore[arg-type]
    packed: Any = redis_client.get(keys.vocabulary(info.fingerprint8))
    found = Vocabulary.unpack(packed)
    assert list(found.tokens) == engine.byte_vocabulary()
    assert found.files == engine.tokenizer_files()
    redis_client.set(keys.vocabulary(info.fingerprint8), b"first")
    publish_vocabulary(Servers(lambda: redis_client), keys, info, engine)  # type: ignore[arg-type]
    assert redis_client.get(keys.vocabulary(info.fingerprint8)) == b"first"


def test_only_known_files_are_published(redis_client: redis.Redis, keys: PoolKeys) -> None:
    class WithFiles(MockEngine):
        def tokenizer_files(self) -> dict[str, bytes]:
            return {"tokenizer.json": b"{}", "modeling.py": b"import os", "x/vocab.txt": b""}

    engine = WithFiles()
    info = model_info(engine.info, WorkerOptions())
    publish_vocabulary(Servers(lambda: redis_client), keys, info, engine)  # type: ignore[arg-type]
    packed: Any = redis_client.get(keys.vocabulary(info.fingerprint8))
    assert Vocabulary.unpack(packed).files == {"tokenizer.json": b"{}"}


def test_an_engine_without_a_tokenizer_publishes_nothing(
    redis_client: redis.Redis, keys: PoolKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MockEngine()
    monkeypatch.setattr(engine, "byte_vocabulary", lambda: None)
    info = model_info(engine.info, WorkerOptions())
    publish_vocabulary(Servers(lambda: redis_client), keys, info, engine)  # type: ignore[arg-type]
    assert not redis_client.exists(keys.vocabulary(info.fingerprint8))


@pytest.mark.parametrize("given", [{}, {"shards": 3}, {"lanes": 5}, {"shards": 3, "lanes": 5}])
def test_what_the_settings_do_not_say_is_as_the_pool_is_served(
    redis_client: redis.Redis, keys: PoolKeys, given: dict[str, int]
) -> None:
    servers: Any = Servers(lambda: redis_client)  # type: ignore[arg-type,return-value]
    settings = options(**given)
    mine = model_info(ENGINE, settings)
    fresh = usual_places(servers, keys, mine, settings)
    assert (fresh.shards, fresh.lanes) == (given.get("shards", 1), given.get("lanes", 64))
    there = replace(mine, shards=2, lanes=7)
    join(servers, keys, there, False, 5000)
    appear(redis_client, keys, there)
    found = usual_places(servers, keys, mine, settings)
    assert (found.shards, found.lanes) == (given.get("shards", 2), given.get("lanes", 7))
    other = replace(mine, fingerprint="e" * 32)
    found = usual_places(servers, keys, other, settings)
    assert (found.shards, found.lanes) == (given.get("shards", 1), given.get("lanes", 64))


def test_of_a_pool_that_was_moved_blocks_stay_settings(
    redis_client: redis.Redis, keys: PoolKeys
) -> None:
    servers: Any = Servers(lambda: redis_client)  # type: ignore[arg-type,return-value]
    there = INFO.moved_to(3, 7)
    join(servers, keys, there, False, 5000)
    appear(redis_client, keys, there)
    mine = replace(INFO, shards=2, blocks=INFO.blocks + 1)
    with pytest.raises(PoolMismatch, match="blocks"):
        join(servers, keys, mine, False, 5000)
    for told in (True, False):
        found = join(servers, keys, mine, told, 5000)
        assert found == replace(there, blocks=mine.blocks)
        assert served(redis_client, keys) == found
        redis_client.delete(keys.serving)

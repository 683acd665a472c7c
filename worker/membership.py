"""Joining a pool: only what serves the same numbers may serve under one name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Final

import redis.exceptions

from lmpool.affinity import usual_lanes
from lmpool.backends.engine import Engine, EngineInfo
from lmpool.clock import to_ms
from lmpool.errors import PoolMismatch, SettingsError, WireError
from lmpool.keys import PoolKeys, ShardKeys
from lmpool.liveness import signs_of_life
from lmpool.model_info import MAX_SHARDS, MAY_DIFFER, ModelInfo, fingerprint
from lmpool.scripts import script
from lmpool.server import get_string, is_lost
from lmpool.servers import Servers
from lmpool.settings import WorkerOptions
from lmpool.vocabulary import TOKENIZER_FILES, Vocabulary

logger = logging.getLogger(__name__)

OLD_KEYS_MS: Final = 86_400_000
"""How long what another model, or another number of shards, left in the pool is kept."""


def model_info(engine: EngineInfo, options: WorkerOptions) -> ModelInfo:
    """What the pool serves with this engine and these settings; in one shard, of the usual number
    of lanes, where they say nothing of these."""
    longest = engine.max_prompt_tokens
    if options.max_prompt_tokens is not None:
        if options.max_prompt_tokens > longest:
            raise SettingsError(
                f"max_prompt_tokens={options.max_prompt_tokens}: {engine.model} takes at most "
                f"{longest} tokens; write {longest} or less"
            )
        longest = options.max_prompt_tokens
    identity = {
        **engine.identity,
        "engine": engine.engine,
        "dtype": engine.dtype,
        "vocab_size": engine.vocab_size,
    }
    return ModelInfo(
        model=engine.model,
        revision=engine.revision,
        fingerprint=fingerprint(identity),
        vocab_size=engine.vocab_size,
        max_prompt_tokens=longest,
        dtype=engine.dtype,
        engine=engine.engine,
        encoding=engine.encoding,
        bos_token_id=engine.bos_token_id,
        eos_token_ids=tuple(engine.eos_token_ids),
        pad_token_id=engine.pad_token_id,
        shards=options.shards or 1,
        lanes=options.lanes or usual_lanes(options.shards or 1),
        block_tokens=options.block_tokens,
        blocks=options.blocks,
        max_backlog=options.max_backlog,
        client_backlog=options.client_backlog,
        result_ttl_ms=to_ms(options.result_ttl),
        head=engine.head,
        no_head=engine.no_head if engine.head is None else "",
    )


def usual_places(
    servers: Servers, keys: PoolKeys, info: ModelInfo, options: WorkerOptions
) -> ModelInfo:
    """`info` with the shards and lanes that a pool has where the settings do not say.

    Those that it is served in, or that a command gave it, if it is the same model; else two shards
    for each primary of a cluster, so that one more takes over few, and the usual number of lanes.
    """
    if options.shards is not None and options.lanes is not None:
        return info
    server = servers.for_key(keys.info)
    held = get_string(server, keys.info)
    if held is not None:
        with suppress(WireError):
            other = ModelInfo.unpack(held)
            lives = other.layout != "" or signs_of_life(server, [keys.serving])[0]
            if other.fingerprint == info.fingerprint and lives:
                return replace(
                    info,
                    shards=options.shards or other.shards,
                    lanes=options.lanes or other.lanes,
                )
    most = min(MAX_SHARDS, 2 * len(servers.everywhere())) if servers.fails_apart else 1
    shards = options.shards or most
    return replace(info, shards=shards, lanes=options.lanes or usual_lanes(shards))


def batch_budget(options: WorkerOptions, info: ModelInfo) -> int:
    """`max_batch_tokens`: as set, or the default; never below the longest prompt."""
    longest = info.max_prompt_tokens
    if options.max_batch_tokens is None:
        return max(options.default_max_batch_tokens, longest)
    if options.max_batch_tokens < longest:
        raise SettingsError(
            f"max_batch_tokens={options.max_batch_tokens} is below the longest prompt, {longest} "
            f"tokens: raise it to {longest}, or serve shorter prompts with max_prompt_tokens"
        )
    return options.max_batch_tokens


def join(
    servers: Servers, keys: PoolKeys, info: ModelInfo, replace: bool, life_ms: int
) -> ModelInfo:
    """Publish `info` as what the pool serves, and for `life_ms` that a worker lives who does.

    Returns what was published: in the shards and lanes that ``lmpool shards`` gave the pool, if it
    ever did. Raises `PoolMismatch` while living workers serve something else, unless `replace`. Of
    two workers that join at the same time the second sees the first.
    """
    server = servers.for_key(keys.info)
    while True:
        held = get_string(server, keys.info) or b""
        info = _where_it_is(held, info)
        packed, mine = info.pack(), info.mark()
        serving = get_string(server, keys.serving) or b""
        others = serving not in (b"", mine) and signs_of_life(server, [keys.serving])[0]
        other = _check_same(keys, held, info, replace, others) if held else None
        if script("replace")(
            server, [keys.info, keys.serving], [held, packed, serving, mine, life_ms]
        ):
            break
    kept = {key for some in _kept_keys(keys, info) for key in some}
    for some in _kept_keys(keys, other) if other is not None else ():
        # Another model's, or of shards that there are no more.
        _try(servers, partial(_end_later, servers, [key for key in some if key not in kept]))
    # It may have been served, replaced, and now served again. Of shards that are away: `mend.lua`.
    for some in _kept_keys(keys, info):
        _try(servers, partial(_keep, servers, some))
    return info


def _where_it_is(held: bytes, info: ModelInfo) -> ModelInfo:
    """`info` in the layout that a command gave the pool: the settings of a worker that starts,
    maybe again, do not take that back. Where its prompts belong within that they do say."""
    with suppress(WireError):
        other = ModelInfo.unpack(held)
        if other.layout and other.fingerprint == info.fingerprint:
            return info.laid_as(other)
    return info


def say_what_is_not_taken(options: WorkerOptions, info: ModelInfo) -> None:
    """Settings that a command overrides: `info` is what was published."""
    differ = [
        f"{variable}={given}"
        for variable, given, taken in (
            ("LMPOOL_SHARDS", options.shards, info.shards),
            ("LMPOOL_LANES", options.lanes, info.lanes),
        )
        if given not in (None, taken)
    ]
    if differ:
        logger.warning(
            "lmpool shards gave the pool %s: not taken of this worker: %s",
            *(info.in_words(), ", ".join(differ)),
        )


def _end_later(servers: Servers, some: Sequence[str]) -> None:
    if some:
        with servers.for_key(some[0]).pipeline(transaction=False) as pipeline:
            for key in some:
                pipeline.pexpire(key, OLD_KEYS_MS)
            pipeline.execute()


def _keep(servers: Servers, some: Sequence[str]) -> None:
    with servers.for_key(some[0]).pipeline(transaction=False) as pipeline:
        for key in some:
            pipeline.persist(key)
        pipeline.execute()


def _try(servers: Servers, do: Callable[[], None]) -> None:
    """Do it where that is possible: a shard that is away keeps no worker from serving others."""
    try:
        do()
    except (redis.exceptions.RedisError, OSError) as error:
        if not (servers.fails_apart and is_lost(error)):
            raise
        logger.warning("joining while a part of the cluster is away: %s", error)


def _kept_keys(keys: PoolKeys, info: ModelInfo) -> Iterator[Sequence[str]]:
    """The keys of one model in a pool that do not end by themselves: those of one slot together."""
    yield [keys.vocabulary(info.fingerprint8)]
    for shard in info.shard_keys(keys):
        yield lasting_keys(shard)


def lasting_keys(shard: ShardKeys) -> tuple[str, ...]:
    """The keys of a shard that do not end by themselves, its streams of jobs first."""
    streams = tuple(stream.key for stream in shard.streams)
    return (*streams, shard.dead, shard.adapters, *shard.calls, shard.waiting)


def _check_same(
    keys: PoolKeys, held: bytes, info: ModelInfo, replace: bool, others_live: bool
) -> ModelInfo | None:
    """What the pool served until now. Raises `PoolMismatch` where it must not be replaced."""
    try:
        other = ModelInfo.unpack(held)
    except WireError as error:
        if replace or not others_live:
            logger.info(
                "pool %s now serves %s; its model info was of no use: %s",
                keys.pool,
                info.model,
                error,
            )
            return None
        raise PoolMismatch(
            f"pool {keys.pool!r} has living workers of another lmpool, whose model info this one "
            f"cannot read ({error}). Run one lmpool on all workers, use another LMPOOL_POOL, or "
            "set LMPOOL_REPLACE=1 to take the pool over"
        ) from None
    different = [
        f.name
        for f in fields(ModelInfo)
        if f.name not in MAY_DIFFER and getattr(other, f.name) != getattr(info, f.name)
    ]
    if not different:
        return other
    if replace or not others_live:
        logger.info("pool %s now serves %s instead of %s", keys.pool, info.model, other.model)
        return other
    text = ", ".join(
        f"{name} {getattr(other, name)!r} there, {getattr(info, name)!r} here" for name in different
    )
    raise PoolMismatch(
        f"pool {keys.pool!r} serves {other.model!r} with living workers, and this worker's "
        f"{info.model!r} differs: {text}. Use another LMPOOL_POOL, or set LMPOOL_REPLACE=1 to take "
        "the pool over"
    )


def publish_vocabulary(servers: Servers, keys: PoolKeys, info: ModelInfo, engine: Engine) -> bool:
    """Put tokenizer and byte vocabulary where clients find them, unless they are there. Whether the
    engine has them, as far as it was asked.

    Not while their node is away and others are served: it comes back with them, or without the
    pool's streams, which are made anew, and then they are.
    """
    has: list[bool] = []
    _try(servers, lambda: has.append(_publish_vocabulary(servers, keys, info, engine)))
    return has != [False]


def _publish_vocabulary(servers: Servers, keys: PoolKeys, info: ModelInfo, engine: Engine) -> bool:
    key = keys.vocabulary(info.fingerprint8)
    server = servers.for_key(key)
    if get_string(server, key) is not None:
        return True
    tokens = engine.byte_vocabulary()
    if tokens is None:
        return False
    files = {n: f for n, f in engine.tokenizer_files().items() if n in TOKENIZER_FILES}
    server.set(key, Vocabulary(tokens, files).pack())
    return True

"""Random writes to every kind of key, by users of every role, while innocent callers ask.

What is written comes from a seed; when it meets what, from the moment.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import LmpoolError, PoolMismatch
from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.rows import pack_logprobs
from lmpool.wants import Digester, Row
from lmpool.wire import Job, claim_head, pack_job
from tests.support.server import RealServer

VOCAB: Final = 256
POOL: Final = "hostile"
ACL: Final = Path(__file__).parents[2] / "deploy" / "redis" / "users.acl"
LAST: Final = "18446744073709551615-18446744073709551615"

Prompt = list[int]
Command = tuple[Any, ...]
Random = random.Random


def users_file(folder: Path) -> str:
    """The shipped users, a second producer, and the test's own."""
    rules = dict(re.findall(r"^user (\S+) (.*)$", ACL.read_text(), re.M))
    rules["villain"] = rules["producer"].replace("producer", "villain")
    rules["default"] = "on nopass ~* &* +@all"
    file = folder / "users.acl"
    file.write_text("".join(f"user {name} {rule}\n" for name, rule in rules.items()))
    return str(file)


def users_of(server: RealServer) -> dict[str, str]:
    """Each user's URL by its name."""
    scheme, _, rest = server.url.partition("://")
    return {
        name: f"{scheme}://{name}:change-this-{name}@{rest.rpartition('@')[2]}"
        for name in ("producer", "villain", "worker")
    }


# --- callers -----------------------------------------------------------------------------------


@dataclass
class Found:
    """What became of the callers' prompts."""

    asked: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    longest: float = 0.0


class Innocents:
    """Callers who ask on and on. What they will ask is known before: it can be lain in wait for."""

    def __init__(self, url: str, *, seed: int, callers: int, size: int, timeout: float) -> None:
        self.found = Found()
        self.next: list[deque[Prompt]] = []
        self._url, self._size, self._timeout = url, size, timeout
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = []
        for number in range(callers):
            rng, ahead = Random(f"{seed} {number}"), deque[Prompt]()
            ahead.extend(self._prompt(rng) for _ in range(3 * size))
            self.next.append(ahead)
            self._threads.append(threading.Thread(target=self._run, args=(rng, ahead, number)))

    def __enter__(self) -> Innocents:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def prompt(self, rng: Random) -> Prompt:
        """One that is being asked, or soon will be."""
        ahead = rng.choice(self.next)
        try:
            return ahead[rng.randrange(2 * self._size)]
        except IndexError:
            return [1]

    def _prompt(self, rng: Random) -> Prompt:
        return [rng.randrange(16, VOCAB) for _ in range(rng.randint(2, 8))]

    def _run(self, rng: Random, ahead: deque[Prompt], number: int) -> None:
        options = {"framework": "numpy", "cache_bytes": 0, "workers_timeout": 60}
        priority = "batch" if number % 2 else "interactive"
        with lmpool.connect(
            self._url, POOL, priority=priority, when_replaced="follow", **options
        ) as lm:
            while not self._over.wait(0.01):
                prompts = [ahead[i] for i in range(self._size)]
                self._ask(lm, prompts)
                for _ in prompts:
                    ahead.popleft()
                    ahead.append(self._prompt(rng))

    def _ask(self, lm: lmpool.PooledLM, prompts: Sequence[Prompt]) -> None:
        began, rows, error = time.monotonic(), None, None
        while rows is None and error is None:
            try:
                rows = lm.batch_next_token_logprobs_sync(prompts, timeout=self._timeout)
            except PoolMismatch:  # the pool was replaced: as documented, it is asked again
                continue
            except LmpoolError as refused:
                error = f"{type(refused).__name__}: {refused}"
        took = time.monotonic() - began
        with self._lock:
            found = self.found
            found.asked += len(prompts)
            found.longest = max(found.longest, took)
            if rows is None:
                found.failed += [f"{error} (after {took:.1f} s)"] * len(prompts)
                return
            for row, prompt in zip(rows, prompts, strict=True):
                differ = np.flatnonzero(row != mock_row(prompt, VOCAB))
                if differ.size:
                    found.wrong.append(f"{prompt}: {differ.size} numbers, from {differ[0]} on")
                else:
                    found.right += 1


# --- what is written ---------------------------------------------------------------------------


def value(rng: Random) -> Any:
    """Something that a field or a key may hold."""
    return rng.choice(
        [
            b"", b"abc", b"0", b"-1", b"1e400", b"nan", b"\xff\xfe", b"9" * 30, b"1-1", LAST,
            b"x" * 5000, rng.randbytes(rng.randint(0, 60)), str(rng.randrange(2**62)),
        ]
    )  # fmt: skip


def in_its_place(rng: Random, key: str) -> list[Command]:
    """A key of any type and content, in the place of another or beside it."""
    fields = [part for _ in range(rng.randint(1, 4)) for part in (value(rng), value(rng))]
    write: Command = rng.choice(
        [
            ("SET", key, value(rng)),
            ("RPUSH", key, *fields),
            ("SADD", key, *fields),
            ("ZADD", key, 1, value(rng)),
            ("HSET", key, *fields),
            ("XADD", key, "*", *fields),
            ("SETRANGE", key, rng.randrange(2000), "x"),
            ("PFADD", key, "x"),
        ]
    )
    return [("DEL", key), write] if rng.random() < 0.7 else [write]


class Writer:
    """Makes up what users of each role write."""

    def __init__(self, seed: int, info: ModelInfo, innocents: Innocents) -> None:
        self._rng = Random(f"{seed} writer")
        self._innocents = innocents
        self.know(info)

    def know(self, info: ModelInfo) -> None:
        """The pool serves another model."""
        self._digester = Digester(info.fingerprint)
        self._keys = PoolKeys(POOL)
        (self._shard,) = info.shard_keys(self._keys)
        self._vocabulary = self._keys.vocabulary(info.fingerprint8)

    def next(self) -> tuple[str, str, list[Command]]:
        """Who does it, what it is called, and its commands."""
        role = "worker" if self._rng.random() < 0.15 else "villain"
        kinds = self._of_workers if role == "worker" else self._of_producers
        kind = self._rng.choices(kinds, [weight for _, weight in kinds])[0][0]
        return role, kind.__name__.strip("_"), kind(self, self._rng, self._shard)

    def _job(self, rng: Random) -> Job:
        """Of a prompt that somebody asks, mostly."""
        prompt = self._innocents.prompt(rng)
        if rng.random() < 0.2:
            prompt = [rng.randrange(2 ** rng.choice([4, 8, 32])) for _ in range(rng.randint(1, 9))]
        tokens = np.array(prompt, "<u4").tobytes()
        adapter = rng.choice([None, None, None, "a@" + "0" * 32])
        want = Row("f32")
        sent = int(time.time() * 1000) if rng.random() < 0.7 else 0
        deadline = rng.choice([None, None, 1, sent + 10_000])
        digest = self._digester.digest(want, tokens, adapter)
        return Job(want, digest, tokens, adapter, deadline, sent)

    def _packed(self, rng: Random) -> bytes:
        """A job, sound or not."""
        job = self._job(rng)
        if rng.random() < 0.15:  # another's digest
            job = replace(job, digest=self._job(rng).digest)
        data = pack_job(job)
        kind = rng.random()
        if kind < 0.35:
            return data
        if kind < 0.6:  # a field of another type
            found = msgpack.unpackb(data)
            found[rng.choice(list(found))] = rng.choice([None, "x", -1, 2**63, [], {}, b"", 1.5])
            packed: bytes = msgpack.packb(found)
            return packed
        if kind < 0.9:  # bytes cut or changed
            broken = bytearray(data[: rng.randint(1, len(data))])
            broken[rng.randrange(len(broken))] = rng.randrange(256)
            return bytes(broken)
        return rng.randbytes(rng.randint(0, 200)) if kind < 0.98 else bytes(3 << 20)

    def _entry(self, rng: Random, shard: ShardKeys) -> list[Command]:
        stream = rng.choice(shard.streams).key
        name: Any = rng.choice(["job", "job", "job", "job", b"\xff", "bytes"])
        more = [value(rng) for _ in range(2 * rng.choice([0, 0, 0, 1, 200]))]
        return [("XADD", stream, "*", name, self._packed(rng), *more)]

    def _flood(self, rng: Random, shard: ShardKeys) -> list[Command]:
        stream = rng.choice(shard.streams).key
        return [("XADD", stream, "*", "job", self._packed(rng)) for _ in range(100)]

    def _last_entry(self, rng: Random, shard: ShardKeys) -> list[Command]:
        return [("XADD", rng.choice(shard.streams).key, LAST, "job", self._packed(rng))]

    def _elsewhere(self, rng: Random, shard: ShardKeys) -> list[Command]:
        lane = rng.choice([7, 10**9, "x", "-1"])
        return in_its_place(rng, f"{shard.prefix}:{rng.choice(['jobs', 'batch'])}:{lane}")

    def _unqueue(self, rng: Random, shard: ShardKeys) -> list[Command]:
        """Delete what is queued."""
        return [("XRANGE", rng.choice(shard.streams).key, "-", "+", "COUNT", rng.randint(1, 5))]

    def _flight(self, rng: Random, shard: ShardKeys) -> list[Command]:
        """A flight of any type and shape."""
        return in_its_place(rng, shard.flight(self._job(rng).digest))

    def _flight_parts(self, rng: Random, shard: ShardKeys) -> list[Command]:
        """A flight of parts that scripts read."""
        parts = [
            rng.choice(["1-1", "x", "-", "+", LAST, value(rng)]),
            rng.choice(
                ["0", "b0", "7", "99999", "-1", shard.dead, shard.counters, "x", value(rng)]
            ),
            rng.choice(["", "1", "abc", "nan", str(2**62), value(rng)]),
            rng.choice(["villain-1", "nobody", "../x", "x" * 300]),
            rng.choice(["", value(rng)]),
        ]
        parts = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
        if rng.random() < 0.2:
            parts.pop(rng.randrange(len(parts)))
        return [("SET", shard.flight(self._job(rng).digest), b" ".join(parts))]

    def _flight_gone(self, rng: Random, shard: ShardKeys) -> list[Command]:
        key = shard.flight(self._job(rng).digest)
        return [rng.choice([("DEL", key), ("PEXPIRE", key, 1), ("SET", key, "")])]

    def _refused_under_a_flight(self, rng: Random, shard: ShardKeys) -> list[Command]:
        """A job that is refused, as the one that a flight waits for."""
        job = self._job(rng)
        data = msgpack.packb({**msgpack.unpackb(pack_job(job)), "sent": "x"})
        stream, own = shard.stream().key, f"{int(time.time() * 1000) + 5}-{rng.randrange(1000)}"
        return [
            ("XADD", stream, own, "job", data),
            ("SET", shard.flight(job.digest), f"{own} 0  "),
        ]

    def _result_gone(self, rng: Random, shard: ShardKeys) -> list[Command]:
        return [("DEL", shard.result(self._job(rng).digest))]

    def _reply(self, rng: Random, shard: ShardKeys) -> list[Command]:
        """Replies of its own: waited for by flights, and broken."""
        name = rng.choice(["villain-1", "villain-2"])
        commands = in_its_place(rng, shard.reply(name))
        if rng.random() < 0.3:
            commands = [("XADD", shard.reply(name), LAST, "a", "b")]
        return [*commands, ("SET", shard.flight(self._job(rng).digest), f"1-1 0  {name} ")]

    def _scripts(self, rng: Random, shard: ShardKeys) -> list[Command]:
        """The scripts themselves, with arguments of any kind."""
        from lmpool.scripts import CLIENT_SCRIPTS, script

        name = rng.choice([*CLIENT_SCRIPTS, "complete", "bury"])
        arguments = [shard.prefix, "villain-1", *[value(rng) for _ in range(rng.randint(0, 12))]]
        if name == "enqueue" and rng.random() < 0.7:
            head = claim_head(self._job(rng).digest, 0, 0, rng.choice([None, 10**9]))
            arguments[2:] = [
                30_000,
                60_000,
                10**9,
                GROUP,
                1,
                value(rng),
                rng.choice([1, value(rng)]),
                rng.choice([head, head, head[:32] + rng.choice(["7", "x"]) * 28, value(rng)]),
                rng.choice([0, value(rng)]),
                b"",
            ]
        return [("EVALSHA", script(name).sha, 1, rng.choice(shard.streams).key, *arguments)]

    def _forbidden(self, rng: Random, shard: ShardKeys) -> list[Command]:
        """What the role must not do: writes to every other kind of key."""
        job = self._job(rng)
        key = rng.choice(
            [
                shard.result(job.digest), shard.counters, shard.dead, shard.adapters, shard.bounds,
                shard.account, shard.held, self._keys.info, self._keys.serving,
                shard.alive("me"), shard.reply("producer-1"), self._vocabulary, shard.stream().key,
            ]
        )  # fmt: skip
        if key == shard.stream().key:
            return [rng.choice([("DEL", key), ("XTRIM", key, "MAXLEN", 0), ("SET", key, "x")])]
        return [
            *in_its_place(rng, key),
            ("EVAL", "while true do end", 0),
            ("FLUSHALL",),
            ("XGROUP", "DESTROY", shard.stream().key, GROUP),
        ]

    _of_producers: Any = (
        (_entry, 20), (_flood, 1), (_last_entry, 0.15), (_elsewhere, 3), (_unqueue, 6),
        (_flight, 16), (_flight_parts, 20), (_flight_gone, 8), (_refused_under_a_flight, 6),
        (_result_gone, 6), (_reply, 8), (_scripts, 6), (_forbidden, 8),
    )  # fmt: skip

    # --- of workers: damage, not wrong rows ---

    def _streams(self, rng: Random, shard: ShardKeys) -> list[Command]:
        return in_its_place(rng, rng.choice(shard.streams).key)

    def _own_keys(self, rng: Random, shard: ShardKeys) -> list[Command]:
        key = rng.choice(
            [shard.counters, shard.dead, shard.adapters, shard.bounds, shard.account,
             shard.held, self._keys.serving, f"{shard.prefix}:new"]
        )  # fmt: skip
        return in_its_place(rng, key)

    def _counters(self, rng: Random, shard: ShardKeys) -> list[Command]:
        name = rng.choice(["computed", "failed", "batches", "expired", "evicted", value(rng)])
        return [("HSET", shard.counters, name, value(rng))]

    def _account(self, rng: Random, shard: ShardKeys) -> list[Command]:
        if rng.random() < 0.2:
            return [("XADD", shard.account, LAST, "held", "1")]
        names = ("held", "bytes", "life", "digests", "c")
        fields = [part for name in names[: rng.randint(1, 5)] for part in (name, value(rng))]
        return [("XADD", shard.account, "*", *fields)]

    def _results(self, rng: Random, shard: ShardKeys) -> list[Command]:
        """What is no row."""
        key = shard.result(self._job(rng).digest)
        if rng.random() < 0.3:
            return [("SET", key, pack_logprobs(np.full(VOCAB, np.nan, "f4")).joined())]
        # Nothing is left of a row: another number in its midst would make it a wrong one.
        return [("DEL", key), *in_its_place(rng, key)]

    def _registry(self, rng: Random, shard: ShardKeys) -> list[Command]:
        return [("HSET", shard.adapters, value(rng), value(rng))]

    def _group(self, rng: Random, shard: ShardKeys) -> list[Command]:
        return [("XGROUP", "DESTROY", rng.choice(shard.streams).key, GROUP)]

    def _everything(self, rng: Random, shard: ShardKeys) -> list[Command]:
        return [("FLUSHALL",)]

    def _info(self, rng: Random, shard: ShardKeys) -> list[Command]:
        return [rng.choice([("DEL", self._keys.info), ("DEL", self._vocabulary)])]

    _of_workers: Any = (
        (_streams, 3), (_own_keys, 20), (_counters, 10), (_account, 10), (_results, 30),
        (_registry, 5), (_group, 2), (_everything, 0.5), (_info, 2),
        (_flight, 10), (_flight_parts, 10), (_entry, 10),
    )  # fmt: skip


class Hostility:
    """Carries out what `Writer` makes up, as the users that do it."""

    def __init__(self, urls: dict[str, str], writer: Writer) -> None:
        self.writer = writer
        self.done = 0
        self.refused = 0
        self.last: deque[str] = deque(maxlen=12)
        self._clients = {
            role: redis.Redis.from_url(urls[role], protocol=2, socket_timeout=10)
            for role in ("villain", "worker")
        }

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()

    def one(self) -> None:
        """One scenario."""
        role, name, commands = self.writer.next()
        self.done += 1
        shown = " ; ".join(" ".join(str(word)[:60] for word in words[:8]) for words in commands[:3])
        self.last.append(f"{self.done}. {role}: {name}: {shown}")
        server = self._clients[role]
        for words in commands:
            try:
                answer = server.execute_command(*words)
                if name == "unqueue":
                    for entry, _ in answer:
                        server.execute_command("XDEL", words[1], entry)
            except redis.exceptions.ResponseError:
                self.refused += 1
            except redis.exceptions.ConnectionError:
                return  # the server is being restarted

    def run(
        self, scenarios: int, pause: float, events: Sequence[tuple[float, Callable[[], None]]] = ()
    ) -> None:
        """So many scenarios; the events come at their parts of them."""
        left = sorted(events, key=lambda event: event[0])
        for number in range(scenarios):
            while left and number >= left[0][0] * scenarios:
                left.pop(0)[1]()
            self.one()
            time.sleep(pause)

"""Adapters: which folders may be loaded, and what is registered under the pool."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import redis.exceptions

from lmpool.backends.engine import Engine
from lmpool.checks import said
from lmpool.commands import Fields, Server, Value
from lmpool.errors import AdapterError, EngineBroken
from lmpool.keys import ShardKeys
from lmpool.registry import REMOVED_MS, Change
from lmpool.scripts import script
from lmpool.servers import Servers

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
REASON_CHARS: Final = 1000
"""Of what an engine says of one that it cannot load."""
MAX_LOADED: Final = 32
"""Adapters that an engine keeps. Requests of others wait until those of one of them have ended."""


def adapter_folder(path: str, allowed: Sequence[str]) -> Path:
    """The adapter's real folder, if the operator allows it and it holds safetensors only.

    Raises `AdapterError` otherwise: nothing is opened outside the allowed folders.
    """
    if not allowed:
        raise AdapterError(
            "adapters are not allowed on this worker: the operator must list their folders in "
            "LMPOOL_ADAPTER_DIRS, as a JSON list"
        )
    try:
        folder = Path(path).resolve()
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise AdapterError(f"adapter folder {path!r:.200}: {error}") from None
    roots = [Path(root).resolve() for root in allowed]
    if not any(folder.is_relative_to(root) and folder != root for root in roots):
        raise AdapterError(
            f"adapter folder {path!r} is not inside one of LMPOOL_ADAPTER_DIRS "
            f"({', '.join(map(str, roots))})"
        )
    if not folder.is_dir():
        raise AdapterError(f"adapter folder {path!r} does not exist on this worker")
    for name in (CONFIG, WEIGHTS):
        file = folder / name
        if not file.is_file():
            raise AdapterError(
                f"adapter folder {path!r} has no {name}: save the adapter with PEFT's "
                "save_pretrained(safe_serialization=True)"
            )
        if not file.resolve().is_relative_to(folder):
            raise AdapterError(f"{name} in {path!r} is a link to outside its folder")
    return folder


def adapter_fingerprint(folder: Path) -> str:
    """32 hex digits that change with the adapter's files."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (CONFIG, WEIGHTS):
        try:
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise AdapterError(f"{name} of adapter folder {str(folder)!r}: {error}") from None
    return digest.hexdigest()


class Adapters:
    """The adapters of this worker's engine. Owned by the engine's thread.

    An adapter is known to the engine as ``name@fingerprint``: replacing a name's files makes
    another adapter, so that no row of the old one is ever given out for the new.
    """

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        shards: Sequence[ShardKeys],
        allowed: Sequence[str],
    ) -> None:
        self._engine = engine
        self._servers = servers
        self._shards = shards
        self._allowed = allowed
        self._loaded: dict[str, None] = {}
        self._known: dict[str, Change] = {}
        """What was done last with each name, as far as this worker has seen."""

    @property
    def loaded(self) -> int:
        """How many the engine has. For any thread."""
        return len(self._loaded)

    def add(
        self,
        name: str,
        path: str,
        in_use: Collection[str] = (),
        check: Callable[[], object] = int,
    ) -> str:
        """Load an adapter and register it under the pool; its fingerprint.

        None of those `in_use` makes room for it. Raises `AdapterError`, and what `check` raises
        before it is registered.
        """
        if not isinstance(name, str) or not 0 < len(name) <= 256 or "@" in name or "\n" in name:
            raise AdapterError(f"adapter name {name!r}: write 1 to 256 characters without '@'")
        folder = adapter_folder(path, self._allowed)
        fingerprint = adapter_fingerprint(folder)
        self._load(f"{name}@{fingerprint}", folder, fingerprint, in_use)
        check()
        self._change(name, fingerprint.encode(), bytes(folder))
        return fingerprint

    def move(self, shards: Sequence[ShardKeys]) -> None:
        """The pool lies in these shards now. For any thread."""
        self._shards = shards

    def learn(self) -> None:
        """Know what others have registered, as far as it can be read: they may be gone when a
        server loses it."""
        for shard in self._shards:
            with suppress(redis.exceptions.RedisError, OSError):
                found = self._servers.apart([shard], partial(_read_all, shard.adapters)) or {}
                for name, entry in found.items():
                    self._learn(name, Change.parse(entry))

    def _learn(self, name: bytes, change: Change) -> None:
        with suppress(UnicodeDecodeError):
            text = name.decode()
            if change.version:
                self._known[text] = max(change, self._known.get(text, change))

    def restore(self) -> None:
        """Register again what a server that lost everything has forgotten; what others have done
        since stands."""
        if self._known:
            self._write(self._known)

    def remove(self, name: str, check: Callable[[], object] = int) -> None:
        """Unregister and unload an adapter. Raises what `check` raises before that."""
        check()
        self._change(name)
        for reference in [r for r in self._loaded if r.rpartition("@")[0] == name]:
            self._unload(reference)

    def _change(self, name: str, fingerprint: bytes = b"", folder: bytes = b"") -> None:
        """Note in every shard, to stay there, that a name stands for this, or for nothing."""
        now = round(time.time() * 1000)
        seen = [change.version for change in (self._known.get(name), *self._said(name)) if change]
        change = Change(max(now, *(version + 1 for version in seen), 1), fingerprint, folder)
        self._known = {
            other: known
            for other, known in self._known.items()
            if not known.removed or known.version > now - REMOVED_MS
        }
        self._known[name] = change
        self._write({name: change})

    def _write(self, changes: Mapping[str, Change]) -> None:
        """Have them in the registry of every shard. Raises redis-py's exceptions."""
        arguments: list[Value] = [REMOVED_MS, len(changes)]
        for name, change in changes.items():
            arguments += (name, change.pack())
        for server, shards in self._servers.by_connection(self._shards):
            for shard in shards:
                script("enter")(server, [shard.adapters], arguments)
            self._servers.settle(server)

    def has_room(self, reference: str, in_use: Collection[str]) -> bool:
        """Whether an adapter can be used beside those that are in use."""
        return (
            reference in self._loaded
            or len(self._loaded) < MAX_LOADED
            or any(loaded not in in_use for loaded in self._loaded)
        )

    def ensure(self, reference: str, in_use: Collection[str] = ()) -> None:
        """Have the adapter ``name@fingerprint`` loaded; `AdapterError` if that cannot be.

        None of those `in_use` makes room for it.
        """
        if reference in self._loaded:
            self._loaded[reference] = self._loaded.pop(reference)
            return
        name, _, fingerprint = reference.rpartition("@")
        # A shard that has come back may have yet to be told.
        registered = (c for c in self._said(name) if c.fingerprint == fingerprint.encode())
        change = next(registered, None)
        if change is None or not fingerprint:
            raise AdapterError(f"adapter {name!r} was removed or replaced")
        folder = adapter_folder(os.fsdecode(change.folder), self._allowed)
        if adapter_fingerprint(folder) != fingerprint:
            raise AdapterError(
                f"the files of adapter {name!r} changed on disk: register it again with "
                "add_new_lora()"
            )
        self._load(reference, folder, fingerprint, in_use)
        self._known[name] = max(change, self._known.get(name, change))

    def _said(self, name: str) -> Iterator[Change]:
        """What was done last with a name, as each shard says that has heard of it, one after
        another. Raises redis-py's exceptions where no shard can be asked."""
        heard = False
        for shard in self._shards:
            found = self._servers.apart([shard], partial(_read, shard.adapters, name))
            heard = heard or found is not None
            if found:
                yield Change.parse(found)
        if not heard:
            raise redis.exceptions.ConnectionError("all shards are away")

    def _load(
        self, reference: str, folder: Path, fingerprint: str, in_use: Collection[str]
    ) -> None:
        if reference not in self._loaded:
            if not self.has_room(reference, in_use):
                raise AdapterError(
                    f"adapter folder {str(folder)!r}: all {MAX_LOADED} adapters that a worker "
                    "keeps are in use; try again in a moment"
                )
            while len(self._loaded) >= MAX_LOADED:
                self._unload(next(loaded for loaded in self._loaded if loaded not in in_use))
            try:
                self._engine.add_adapter(reference, str(folder))
            except (AdapterError, EngineBroken):
                raise
            except Exception as error:  # files that are no adapter of this model
                raise AdapterError(
                    f"adapter folder {str(folder)!r} cannot be loaded: {said(error, REASON_CHARS)}"
                ) from error
            self._loaded[reference] = None
            if adapter_fingerprint(folder) != fingerprint:
                self._unload(reference)
                raise AdapterError(
                    f"the files of adapter folder {str(folder)!r} changed while they were read: "
                    "register it again with add_new_lora()"
                )

    def _unload(self, reference: str) -> None:
        self._engine.remove_adapter(reference)
        del self._loaded[reference]


def _read(registry: str, name: str, server: Server) -> bytes:
    return server.hget(registry, name) or b""


def _read_all(registry: str, server: Server) -> Fields:
    return server.hgetall(registry)

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fakeredis
import pytest

from lmpool.backends.mock import MockEngine
from lmpool.errors import AdapterError, EngineBroken
from lmpool.keys import PoolKeys
from lmpool.producer.adapters import read_registry
from lmpool.registry import Change
from lmpool.servers import Servers
from lmpool.worker import adapters as adapters_module
from lmpool.worker.adapters import Adapters, adapter_fingerprint, adapter_folder

SHARDS = PoolKeys("p").shards("01234567", 2)


def save_adapter(folder: Path, config: str = "{}", weights: bytes = b"w") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    return tmp_path / "allowed"


# --- folders -----------------------------------------------------------------------------------


def test_an_adapter_inside_an_allowed_folder_is_taken(allowed: Path) -> None:
    folder = save_adapter(allowed / "some" / "adapter")
    assert adapter_folder(str(folder), [str(allowed)]) == folder.resolve()
    assert adapter_folder(str(folder), ["/nowhere", str(allowed)]) == folder.resolve()
    # A path that leaves and comes back is where it ends.
    roundabout = allowed / "some" / ".." / "some" / "adapter"
    assert adapter_folder(str(roundabout), [str(allowed)]) == folder.resolve()


def test_without_allowed_folders_there_are_no_adapters(allowed: Path) -> None:
    with pytest.raises(AdapterError, match=r"not allowed on this worker.*LMPOOL_ADAPTER_DIRS"):
        adapter_folder(str(save_adapter(allowed / "a")), [])


@pytest.mark.parametrize("path", ["elsewhere/a", "allowed/../elsewhere/a", "allowed-too/a", "."])
def test_a_folder_outside_is_refused(path: str, tmp_path: Path, allowed: Path) -> None:
    for name in ("elsewhere", "allowed-too"):
        save_adapter(tmp_path / name / "a")
    allowed.mkdir()
    with pytest.raises(AdapterError, match="is not inside one of LMPOOL_ADAPTER_DIRS"):
        adapter_folder(str(tmp_path / path), [str(allowed)])


def test_an_allowed_folder_is_not_itself_an_adapter(allowed: Path) -> None:
    save_adapter(allowed)
    with pytest.raises(AdapterError, match="is not inside"):
        adapter_folder(str(allowed), [str(allowed)])


def test_a_link_out_of_the_allowed_folder_is_refused(tmp_path: Path, allowed: Path) -> None:
    allowed.mkdir()
    (allowed / "link").symlink_to(save_adapter(tmp_path / "elsewhere"))
    with pytest.raises(AdapterError, match="is not inside"):
        adapter_folder(str(allowed / "link"), [str(allowed)])


def test_a_link_into_an_allowed_folder_is_followed(tmp_path: Path, allowed: Path) -> None:
    folder = save_adapter(allowed / "a")
    (tmp_path / "link").symlink_to(folder)
    assert adapter_folder(str(tmp_path / "link"), [str(allowed)]) == folder.resolve()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_a_link_to_outside_is_refused(
    name: str, tmp_path: Path, allowed: Path
) -> None:
    folder = save_adapter(allowed / "a")
    (folder / name).unlink()
    (tmp_path / "secret").write_text("{}")
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(AdapterError, match=f"{name} .* is a link to outside"):
        adapter_folder(str(folder), [str(allowed)])


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_its_files_is_refused(name: str, allowed: Path) -> None:
    folder = save_adapter(allowed / "a")
    (folder / name).unlink()
    with pytest.raises(AdapterError, match=f"has no {name}: save the adapter"):
        adapter_folder(str(folder), [str(allowed)])
    (folder / name).mkdir()
    with pytest.raises(AdapterError, match=f"has no {name}"):
        adapter_folder(str(folder), [str(allowed)])


def test_pickled_weights_alone_are_refused(allowed: Path) -> None:
    folder = save_adapter(allowed / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="safe_serialization"):
        adapter_folder(str(folder), [str(allowed)])


def test_a_folder_that_is_not_there_is_refused(allowed: Path) -> None:
    allowed.mkdir()
    with pytest.raises(AdapterError, match="does not exist on this worker"):
        adapter_folder(str(allowed / "a"), [str(allowed)])
    (allowed / "file").write_text("")
    with pytest.raises(AdapterError, match="does not exist"):
        adapter_folder(str(allowed / "file"), [str(allowed)])


@pytest.mark.parametrize("path", ["", "\0", "a\0b", "~root", "a" * 5000])
def test_a_path_that_is_none_is_refused(path: str, allowed: Path) -> None:
    allowed.mkdir()
    with pytest.raises(AdapterError):
        adapter_folder(path, [str(allowed)])


def test_the_fingerprint_follows_the_files(allowed: Path) -> None:
    first = save_adapter(allowed / "a")
    same = save_adapter(allowed / "b")
    assert adapter_fingerprint(first) == adapter_fingerprint(same)
    assert len(adapter_fingerprint(first)) == 32
    others = [
        save_adapter(allowed / "c", config="{ }"),
        save_adapter(allowed / "d", weights=b"W"),
        save_adapter(allowed / "e", config="", weights=b"{}w"),
    ]
    assert len({adapter_fingerprint(folder) for folder in (first, *others)}) == 4


# --- the adapters of a worker ------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[fakeredis.FakeRedis]:
    with fakeredis.FakeRedis(version=(7,)) as client:
        yield client


@pytest.fixture
def servers(server: fakeredis.FakeRedis) -> Servers:
    return Servers(lambda: server)  # type: ignore[arg-type,return-value]


@pytest.fixture
def engine() -> MockEngine:
    return MockEngine()


@pytest.fixture
def adapters(engine: MockEngine, servers: Servers, allowed: Path) -> Adapters:
    return Adapters(engine, servers, SHARDS, [str(allowed)])


def test_an_added_adapter_is_loaded_and_registered_in_every_shard(
    adapters: Adapters, engine: MockEngine, server: fakeredis.FakeRedis, allowed: Path
) -> None:
    folder = save_adapter(allowed / "a")
    fingerprint = adapters.add("mine", str(folder))
    assert fingerprint == adapter_fingerprint(folder)
    assert engine.adapters == {f"mine@{fingerprint}": str(folder)}
    for shard in SHARDS:
        entry = server.hget(shard.adapters, "mine")
        assert entry is not None
        version, *known = Change.parse(entry)
        assert known == [fingerprint.encode(), str(folder).encode()]
        assert version > 10**12


@pytest.mark.parametrize("name", ["", "a@b", "a\nb", "a" * 257, None, 3])
def test_a_name_that_cannot_be_registered_is_refused(
    name: object, adapters: Adapters, engine: MockEngine, allowed: Path
) -> None:
    with pytest.raises(AdapterError, match="write 1 to 256 characters without '@'"):
        adapters.add(name, str(save_adapter(allowed / "a")))  # type: ignore[arg-type]
    assert not engine.adapters


def test_an_adapter_that_is_refused_is_not_registered(
    adapters: Adapters, server: fakeredis.FakeRedis, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError):
        adapters.add("mine", str(save_adapter(tmp_path / "elsewhere")))
    assert not server.exists(SHARDS[0].adapters)


def test_another_worker_finds_what_was_registered(
    adapters: Adapters, servers: Servers, allowed: Path
) -> None:
    fingerprint = adapters.add("mine", str(save_adapter(allowed / "a")))
    other_engine = MockEngine()
    other = Adapters(other_engine, servers, SHARDS, [str(allowed)])
    other.ensure(f"mine@{fingerprint}")
    other.ensure(f"mine@{fingerprint}")
    assert list(other_engine.adapters) == [f"mine@{fingerprint}"]


def test_a_removed_adapter_is_unloaded_and_unknown(
    adapters: Adapters, engine: MockEngine, server: fakeredis.FakeRedis, allowed: Path
) -> None:
    fingerprint = adapters.add("mine", str(save_adapter(allowed / "a")))
    adapters.remove("mine")
    assert not engine.adapters
    for shard in SHARDS:
        entry = server.hget(shard.adapters, "mine")
        assert entry is not None
        assert Change.parse(entry).removed
    for reference in (f"mine@{fingerprint}", "mine@"):
        with pytest.raises(AdapterError, match="'mine' was removed or replaced"):
            adapters.ensure(reference)
    adapters.remove("mine")


def test_what_another_worker_removed_does_not_come_back(
    adapters: Adapters, servers: Servers, server: fakeredis.FakeRedis, allowed: Path
) -> None:
    fingerprint = adapters.add("mine", str(save_adapter(allowed / "a")))
    other = Adapters(MockEngine(), servers, SHARDS, [str(allowed)])
    other.ensure(f"mine@{fingerprint}")
    adapters.remove("mine")
    server.delete(SHARDS[0].adapters)  # its node has lost everything
    other.restore()
    adapters.restore()
    assert read_registry(servers, SHARDS) == {}
    # Also where a clock is ahead: the newest is what was done last.
    later = Change(10**14, b"0", b"/").pack()
    server.hset(SHARDS[1].adapters, "mine", later)
    other.add("mine", str(allowed / "a"))
    other.remove("mine")
    assert read_registry(servers, SHARDS) == {}


def test_a_shard_that_has_yet_to_be_told_hides_no_adapter(
    adapters: Adapters, servers: Servers, server: fakeredis.FakeRedis, allowed: Path
) -> None:
    fingerprint = adapters.add("mine", str(save_adapter(allowed / "a")))
    adapters.add("other", str(allowed / "a"))
    server.hdel(SHARDS[0].adapters, "mine")
    other = Adapters(MockEngine(), servers, SHARDS, [str(allowed)])
    other.ensure(f"mine@{fingerprint}")
    assert read_registry(servers, SHARDS).keys() == {"mine", "other"}
    assert read_registry(servers, SHARDS, "mine").keys() == {"mine", "other"}
    assert read_registry(servers, SHARDS, "other").keys() == {"other"}  # one is enough
    server.hset(SHARDS[0].adapters, "mine", Change(1, b"", b"").pack())  # it was told of a removal
    assert read_registry(servers, SHARDS, "mine") == {"mine": fingerprint, "other": fingerprint}


def test_a_replaced_adapter_is_another(adapters: Adapters, servers: Servers, allowed: Path) -> None:
    old = adapters.add("mine", str(save_adapter(allowed / "a")))
    new = adapters.add("mine", str(save_adapter(allowed / "b", weights=b"new")))
    assert old != new
    other = Adapters(MockEngine(), servers, SHARDS, [str(allowed)])
    other.ensure(f"mine@{new}")
    with pytest.raises(AdapterError, match="removed or replaced"):
        other.ensure(f"mine@{old}")


def test_files_that_changed_on_disk_are_another_adapter(
    adapters: Adapters, servers: Servers, allowed: Path
) -> None:
    folder = save_adapter(allowed / "a")
    fingerprint = adapters.add("mine", str(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"other")
    other = Adapters(MockEngine(), servers, SHARDS, [str(allowed)])
    with pytest.raises(AdapterError, match="changed on disk: register it again"):
        other.ensure(f"mine@{fingerprint}")


def test_files_that_change_while_they_are_loaded_are_not_used(
    adapters: Adapters,
    engine: MockEngine,
    server: fakeredis.FakeRedis,
    allowed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save_adapter(allowed / "a")
    load = engine.add_adapter

    def load_what_is_being_written(name: str, path: str) -> None:
        (folder / "adapter_model.safetensors").write_bytes(b"half of the new ones")
        load(name, path)

    monkeypatch.setattr(engine, "add_adapter", load_what_is_being_written)
    with pytest.raises(AdapterError, match="changed while they were read: register it again"):
        adapters.add("mine", str(folder))
    assert not engine.adapters
    assert not server.exists(SHARDS[0].adapters)


def test_a_worker_that_does_not_allow_the_folder_does_not_load_it(
    adapters: Adapters, servers: Servers, allowed: Path, tmp_path: Path
) -> None:
    fingerprint = adapters.add("mine", str(save_adapter(allowed / "a")))
    other = Adapters(MockEngine(), servers, SHARDS, [str(tmp_path / "other")])
    with pytest.raises(AdapterError, match="not inside"):
        other.ensure(f"mine@{fingerprint}")


def test_the_least_recently_used_adapter_makes_room(
    adapters: Adapters, engine: MockEngine, allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "MAX_LOADED", 2)
    references = {}
    for name in ("a", "b"):
        folder = save_adapter(allowed / name, weights=name.encode())
        references[name] = f"{name}@{adapters.add(name, str(folder))}"
    adapters.ensure(references["a"])
    adapters.add("c", str(save_adapter(allowed / "c", weights=b"c")))
    assert references["a"] in engine.adapters
    assert references["b"] not in engine.adapters
    assert len(engine.adapters) == 2
    adapters.ensure(references["b"])  # comes back when it is needed
    assert references["b"] in engine.adapters


def test_adapters_in_use_make_no_room(
    adapters: Adapters, engine: MockEngine, allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "MAX_LOADED", 2)
    references = []
    for name in ("a", "b", "c"):
        folder = save_adapter(allowed / name, weights=name.encode())
        references.append(f"{name}@{adapters.add(name, str(folder), references[:1])}")
    a, b, c = references
    assert list(engine.adapters) == [a, c]
    assert adapters.has_room(b, {a})
    assert adapters.has_room(a, {a, c})
    assert not adapters.has_room(b, {a, c})
    with pytest.raises(AdapterError, match="are in use; try again"):
        adapters.ensure(b, {a, c})
    assert list(engine.adapters) == [a, c]
    adapters.ensure(b, {c})
    assert list(engine.adapters) == [c, b]


def test_files_that_cannot_be_read_are_refused(
    adapters: Adapters, allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_adapter(allowed / "a")

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(AdapterError, match=r"adapter_config\.json .*Permission denied"):
        adapters.add("mine", str(folder))


def test_files_that_are_no_adapter_of_the_model_are_refused(
    adapters: Adapters,
    engine: MockEngine,
    server: fakeredis.FakeRedis,
    allowed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str, path: str) -> None:
        raise KeyError("lora_A")

    monkeypatch.setattr(engine, "add_adapter", refuse)
    with pytest.raises(AdapterError, match=r"cannot be loaded: KeyError: 'lora_A'"):
        adapters.add("mine", str(save_adapter(allowed / "a")))
    assert not server.exists(SHARDS[0].adapters)


def test_an_engine_that_breaks_while_it_loads_is_broken(
    adapters: Adapters, engine: MockEngine, allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, path: str) -> None:
        raise EngineBroken("out of memory")

    monkeypatch.setattr(engine, "add_adapter", fail)
    with pytest.raises(EngineBroken):
        adapters.add("mine", str(save_adapter(allowed / "a")))

"""API keys: the file, its changes, and what a request says."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmpool.cli import app
from lmpool.errors import SettingsError
from lmpool.gateway import keys
from lmpool.gateway.keys import KeyFile, given_key, line, new_key, parse


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "LOOK", 0.0)


def test_a_key_is_found_by_its_hash_and_no_other_is(tmp_path: Path) -> None:
    alice, bob = new_key(), new_key()
    path = tmp_path / "keys"
    path.write_text(f"# who may ask\n\n{line('alice', alice)}\n{line('bob', bob, 3)}\n")
    found = KeyFile(path)
    assert alice not in path.read_text()
    assert [getattr(found.find(k.encode()), "name", None) for k in (alice, bob, bob[:-1], "")] == [
        "alice", "bob", None, None,
    ]  # fmt: skip
    key = found.find(bob.encode())
    assert key is not None
    assert key.requests == 3


def test_a_byte_order_mark_is_none_of_a_key(tmp_path: Path) -> None:
    alice = new_key()
    path = tmp_path / "keys"
    path.write_text(line("alice", alice), "utf-8-sig")
    found = KeyFile(path).find(alice.encode())
    assert found is not None
    assert found.name == "alice"
    given = f"\ufeff{alice}\n".encode()
    shown = CliRunner().invoke(app, ["gateway-key", "alice", "--stdin"], input=given)
    assert shown.stdout.strip() == line("alice", alice)


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    first, second = new_key(), new_key()
    path = tmp_path / "keys"
    path.write_text(line("first", first))
    found = KeyFile(path)
    other = tmp_path / "new"
    other.write_text(line("second", second))
    os.replace(other, path)
    assert found.find(first.encode()) is None
    assert found.find(second.encode()) is not None


def test_a_key_is_an_operators_where_its_line_says_so() -> None:
    lines = [line("a", "a"), line("b", "b", operator=True), line("c", "c", 3, operator=True)]
    found = parse("\n".join(lines), Path("keys"))
    assert [key.operator for key in found] == [False, True, True]
    assert found[2].requests == 3
    for wrong in (f"{lines[0]} operators", f"{lines[1]} requests=3", f"{lines[0]} admin"):
        with pytest.raises(SettingsError, match="operator"):
            parse(wrong, Path("keys"))


@pytest.mark.parametrize("change", ["damage", "remove"])
def test_a_file_that_cannot_be_read_leaves_the_keys_that_were(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret = new_key()
    path = tmp_path / "keys"
    path.write_text(line("first", secret))
    found = KeyFile(path)
    path.write_text(f"first {secret}") if change == "damage" else path.unlink()
    assert found.find(secret.encode()) is not None
    assert "as before" in caplog.text
    assert secret not in caplog.text


def test_a_file_that_could_not_be_read_is_read_again_though_it_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, (old, new) = tmp_path / "keys", (new_key(), new_key())
    path.write_text(line("old", old))
    found = KeyFile(path)
    path.write_text(f"{line('new', new)}\n")
    with monkeypatch.context() as closed:
        closed.setattr(Path, "open", unreadable)
        assert found.find(old.encode()) is not None
        assert found.find(old.encode()) is not None
    assert caplog.text.count("as before") == 1
    assert found.find(new.encode()) is not None
    assert found.find(old.encode()) is None


def unreadable(*_: object, **__: object) -> None:
    raise PermissionError("not now")


def test_a_file_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        KeyFile(tmp_path / "none")


@pytest.mark.parametrize(
    "text", ["lonely", "a sha256:12", "a md5:" + "0" * 64, f"a sha256:{'0' * 64} requests=0"]
)
def test_a_line_that_is_no_key_is_named_by_its_number_and_not_shown(text: str) -> None:
    with pytest.raises(SettingsError, match="keys, line 2: write NAME sha256:HASH") as caught:
        parse(f"\n{text}", Path("keys"))
    assert text not in str(caught.value)


def test_names_have_no_spaces() -> None:
    with pytest.raises(SettingsError, match="without spaces"):
        line("a b", new_key())


def basic(login: str) -> bytes:
    return b"Basic " + base64.b64encode(login.encode())


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (None, None),
        (b"", None),
        (b"Bearer ", None),
        (b"Bearer k", b"k"),
        (b"bearer   k  ", b"k"),
        (basic("anyone:k"), b"k"),
        (basic(":k:l"), b"k:l"),
        (basic("k"), None),
        (b"Basic !!!", None),
        (b"Digest k", None),
        (b"k", None),
        ("Bearer ä".encode(), "ä".encode()),
    ],
)
def test_a_key_comes_as_a_bearer_or_as_the_password_of_basic(
    header: bytes | None, key: bytes | None
) -> None:
    assert given_key(header) == key


def test_every_key_is_compared_whichever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long it takes does not tell which one it was, or how much of one was right."""
    all_keys = [new_key() for _ in range(5)]
    path = tmp_path / "keys"
    path.write_text("\n".join(line(f"k{i}", key) for i, key in enumerate(all_keys)))
    found = KeyFile(path)
    compared: list[bytes] = []
    real = keys.hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return real(a, b)

    monkeypatch.setattr(keys.hmac, "compare_digest", counted)
    for key in (*all_keys, "wrong"):
        compared.clear()
        found.find(key.encode())
        assert len(compared) == len(all_keys)


@pytest.mark.parametrize("requests", [0, -1, 10**9, 10**30])
def test_a_line_that_is_made_is_one_that_is_read(requests: int, tmp_path: Path) -> None:
    assert parse(line("alice", new_key(), 10**9 - 1), tmp_path)[0].requests == 10**9 - 1
    with pytest.raises(SettingsError, match=f"requests={requests}: write a number from 1 to"):
        line("alice", new_key(), requests)
    with pytest.raises(SettingsError, match=r"name='al\\udcffce': write a name in UTF-8"):
        line("al\udcffce", new_key())


def test_a_given_key_that_is_no_text_is_refused() -> None:
    shown = CliRunner().invoke(app, ["gateway-key", "alice", "--stdin"], input=b"\xff\n")
    assert shown.exit_code == 2
    assert "a key that is no text in UTF-8" in shown.output

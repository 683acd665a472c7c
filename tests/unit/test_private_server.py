"""Which server a private pool takes."""

from __future__ import annotations

from pathlib import Path

import pytest

import lmpool
from lmpool.errors import SettingsError
from lmpool.producer.embedded import private_server
from tests.support.embedded import MOCK, program


def test_without_a_server_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LMPOOL_TEST_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(private_server, "_bundled", lambda: None)
    with pytest.raises(SettingsError, match=r"lmpool\[embedded\]"):
        lmpool.embedded(**MOCK)


def test_a_server_that_is_too_old_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LMPOOL_TEST_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path / "redis-server", "Redis server v=6.2.14 sha=0:0 bits=64")
    monkeypatch.setattr(private_server, "_bundled", lambda: None)
    with pytest.raises(SettingsError, match=r"6\.2\.14"):
        private_server.find_server()
    newer = program(tmp_path / "valkey-server", "Valkey server v=8.1.0 sha=0:0 bits=64")
    assert private_server.find_server() == private_server.Program(str(newer), "Valkey 8.1.0")
    newer.unlink()
    bundled = program(tmp_path / "bundled", "Valkey server v=9.1.2 sha=0:1 bits=64")
    monkeypatch.setattr(private_server, "_bundled", lambda: str(bundled))
    assert private_server.find_server().version == "Valkey 9.1.2"


def test_the_named_server_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = program(tmp_path / "mine", "Redis server v=7.4.1 sha=0:0 bits=64")
    monkeypatch.setenv("LMPOOL_TEST_SERVER", str(named))
    assert private_server.find_server() == private_server.Program(str(named), "Redis 7.4.1")
    monkeypatch.setenv("LMPOOL_TEST_SERVER", str(tmp_path / "nothing"))
    with pytest.raises(SettingsError, match="LMPOOL_TEST_SERVER"):
        private_server.find_server()
    monkeypatch.setenv("LMPOOL_TEST_SERVER", str(program(tmp_path / "other", "hello")))
    with pytest.raises(SettingsError, match="no Redis or Valkey"):
        private_server.find_server()

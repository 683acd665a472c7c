"""Settings of a file: what counts, what is refused, and how that is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lmpool
from lmpool.cli import app
from lmpool.errors import SettingsError
from lmpool.settings import ClientOptions, GatewaySettings, WorkerOptions

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a file, by default the one that is found without being named."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "lmpool.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_arguments_go_before_variables_and_those_before_the_file(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("""
        pool = "file"
        batch_size = 10
        max_backlog = 10
        result_bytes = "1MiB"
        replace = true
        engine_opts = { a = 1, deep = { b = 2 } }
        [gateway]
        port = 9000
        api_keys = "keys"
    """)
    monkeypatch.setenv("LMPOOL_BATCH_SIZE", "20")
    monkeypatch.setenv("LMPOOL_MAX_BACKLOG", "20")
    options = WorkerOptions(batch_size=30)
    assert (options.batch_size, options.max_backlog, options.pool) == (30, 20, "file")
    assert (options.result_bytes, options.replace) == (1 << 20, True)
    assert options.engine_opts == {"a": 1, "deep": {"b": 2}}
    monkeypatch.setenv("LMPOOL_ENGINE_OPTS", '{"c": 3}')
    assert WorkerOptions().engine_opts == {"c": 3}  # in place of it, and not beside
    assert ClientOptions().pool == "file"
    assert lmpool.connect(framework="numpy").pool == "file"
    gateway = GatewaySettings()
    assert (gateway.port, gateway.api_keys) == (9000, Path("keys"))
    monkeypatch.setenv("LMPOOL_GATEWAY_PORT", "")  # which says nothing
    assert GatewaySettings().port == 9000


def test_the_file_that_is_named_counts_and_must_be_there(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write('pool = "usual"')
    other = write('pool = "other"', "other.toml")
    assert ClientOptions().pool == "usual"
    monkeypatch.setenv("LMPOOL_CONFIG", str(other))
    assert ClientOptions().pool == "other"
    monkeypatch.setenv("LMPOOL_CONFIG", str(other.parent))
    with pytest.raises(SettingsError, match=r"LMPOOL_CONFIG=.* cannot be read"):
        ClientOptions()
    other.unlink()
    monkeypatch.setenv("LMPOOL_CONFIG", str(other))
    with pytest.raises(SettingsError, match=r"other.toml cannot be read.*No such file"):
        ClientOptions()


def test_a_byte_order_mark_is_none_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "marked.toml"
    file.write_text('pool = "marked"', "utf-8-sig")
    monkeypatch.setenv("LMPOOL_CONFIG", str(file))
    assert ClientOptions().pool == "marked"


WRONG = [
    ("batch_size = 0", r"lmpool.toml: batch_size=0: input should be greater than or equal to 1"),
    ("batch_size = true", r"lmpool.toml: batch_size=True: True and False are none of its values"),
    ("batchsize = 3", r"lmpool.toml: unknown setting batchsize: did you mean batch_size\?"),
    ("port = 3", r"lmpool.toml: unknown setting port: "),
    ('url = "http://:s3cret@x"', r"lmpool.toml: url=.*: unknown scheme 'http'"),
    ("x = [", r"lmpool.toml is no TOML"),
    ("gateway = 3", r"lmpool.toml: gateway is a table: write \[gateway\]"),
    ("[gateway]\nport = 70000", r"lmpool.toml: port=70000: input should be less than or equal to"),
    ("[gateway]\nbatch_size = 3", r"lmpool.toml: unknown setting batch_size: "),
    ("[worker]\nbatch_size = 3", r"lmpool.toml: unknown setting worker: "),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_what_cannot_be_used_is_named_with_its_file(write: Write, text: str, said: str) -> None:
    write(text)
    with pytest.raises(SettingsError, match=said) as error:
        WorkerOptions(), GatewaySettings()  # type: ignore[unused-ignore]
    assert "s3cret" not in str(error.value)


def shown(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == status, done.output
    return done.output


def test_what_is_in_force_is_shown_with_its_source_and_without_secrets(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        'url = "redis://:s3cret@host/0"\n'
        'engine_opts = { hf_token = "s3cret", device = "cpu", tokens = ["s3cret"] }',
        "own.toml",
    )
    monkeypatch.setenv("LMPOOL_CONFIG", "")  # what --config sets is gone after the test
    monkeypatch.setenv("LMPOOL_GATEWAY_POOL", "a=redis://:s3cret@other/0 b")
    text = shown("--config", "own.toml", "config")
    assert os.environ["LMPOOL_CONFIG"] == str(path)
    found: list[dict[str, Any]] = json.loads(shown("config", "--json"))
    assert "s3cret" not in text + json.dumps(found)
    by_name = {(each["of"], each["name"]): (each["value"], each["from"]) for each in found}
    assert by_name["client", "url"] == ("redis://:***@host/0", str(path))
    masked = {"hf_token": "***", "device": "cpu", "tokens": ["***"]}
    assert by_name["worker", "engine_opts"] == (masked, str(path))
    assert by_name["gateway", "pool"] == ("a=redis://:***@other/0 b", "LMPOOL_GATEWAY_POOL")
    assert by_name["gateway", "port"] == (8000, "default")
    for options in (ClientOptions, WorkerOptions, GatewaySettings):
        assert all(name in text for name in options.model_fields)


def test_a_file_that_cannot_be_used_is_one_line(write: Write) -> None:
    write("batch_size = 0")
    shown("config", status=2)

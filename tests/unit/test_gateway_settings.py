"""What a gateway is told by options and by variables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import lmpool
from lmpool.cli import app
from lmpool.cli.gateway import serve_pool
from lmpool.errors import SettingsError
from lmpool.exit_status import EXIT_REFUSED
from lmpool.gateway import serve as serve_module
from lmpool.gateway.options import GatewayOptions, PoolAddress
from lmpool.settings import (
    GATEWAY_PREFIX,
    ClientOptions,
    GatewaySettings,
    WorkerOptions,
    pool_addresses,
    refuse_unknown_variables,
)
from tests.support.readme import GATEWAY, gateway_table, section

Served = list[tuple[GatewayOptions, dict[str, Any]]]
"""What it is told, and what the process around it is."""

AS_WRITTEN: dict[str, tuple[str, str, str, Any, Any]] = {
    "pool": ("a b=redis://h:1/0", "c", "pools", None, (PoolAddress("c"),)),
    "host": ("::1", "localhost", "host", "::1", "localhost"),
    "port": ("81", "82", "port", 81, 82),
    "api_keys": ("/a", "/b", "api_keys", Path("/a"), Path("/b")),
    "chat_template": ("/a", "/b", "chat_template", Path("/a"), Path("/b")),
    "queue_timeout": ("1.5", "2", "queue_timeout", 1.5, 2.0),
    "timeout": ("3", "4.5", "request_timeout", 3.0, 4.5),
    "body_timeout": ("5", "6", "body_timeout", 5.0, 6.0),
    "max_body": ("7", "8", "max_body_bytes", 7, 8),
    "max_response": ("2MiB", "1.5MiB", "max_response_bytes", 2 << 20, 3 << 19),
    "max_prompts": ("9", "10", "max_prompts", 9, 10),
    "max_n": ("11", "12", "max_n", 11, 12),
    "max_logprobs": ("0", "1", "max_logprobs", 0, 1),
    "max_in_flight": ("13", "14", "max_in_flight", 13, 14),
    "key_requests": ("15", "16", "key_requests", 15, 16),
    "compress": ("never", "always", "compress", "never", "always"),
    "log_level": ("debug", "error", "log_level", "debug", "error"),
    "log_format": ("json", "json", "log_format", "json", "json"),
}
"""Of each setting: what its variable says, what its option says, and what comes of either."""

BAD: list[tuple[str, str, str]] = [
    ("pool", "a/b", "is no pool name: write 1 to 64 letters"),
    ("pool", "a a", "more than once"),
    ("pool", "a=http://h", "unknown scheme 'http'"),
    ("port", "65536", "less than or equal to 65535"),
    ("port", "-1", "greater than or equal to 0"),
    ("port", "http", "valid integer"),
    ("queue_timeout", "0", "greater than 0"),
    ("timeout", "soon", "valid number"),
    ("timeout", "inf", "finite"),
    ("body_timeout", "-1", "greater than 0"),
    ("max_body", "0", "greater than or equal to 1"),
    ("max_body", "much", "byte"),
    ("max_response", "0", "greater than or equal to 1"),
    ("max_prompts", "0", "greater than or equal to 1"),
    ("max_n", "1.5", "valid integer"),
    ("max_logprobs", "-1", "greater than or equal to 0"),
    ("max_in_flight", "0", "greater than or equal to 1"),
    ("key_requests", "0", "greater than or equal to 1"),
    ("compress", "maybe", "'auto', 'always' or 'never'"),
    ("log_level", "loud", "'debug', 'info', 'warning' or 'error'"),
    ("log_format", "xml", "'text' or 'json'"),
]
SECRET = "s3cret"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """What the command comes to serve, which it does not."""
    found: Served = []
    logs: dict[str, Any] = {}

    def serve(options: GatewayOptions, host: str, port: int, show: Any) -> None:
        found.append((options, {"host": host, "port": port, **logs}))

    def logging_config(level: str, form: str, **_: Any) -> dict[str, Any]:
        logs.update(log_level=level, log_format=form)
        return {"version": 1, "incremental": True}  # nothing of this process's own

    monkeypatch.setattr("lmpool.cli.gateway.logging_config", logging_config)
    monkeypatch.setattr(serve_module, "serve", serve)
    return found


def gateway(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["gateway", *arguments], env={"COLUMNS": "500"})


def variable(name: str) -> str:
    return GATEWAY_PREFIX + name.upper()


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def come_of(served: Served, name: str) -> Any:
    """What the last command makes of the option or argument of this name."""
    options, around = served[-1]
    return around[name] if name in around else getattr(options, name)


def test_every_setting_is_tried_here() -> None:
    assert AS_WRITTEN.keys() == GatewaySettings.model_fields.keys()


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_an_option_comes_before_its_variable_and_that_before_the_usual(
    name: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_variable, in_option, what, of_variable, of_option = AS_WRITTEN[name]
    if name == "pool":
        of_variable = (PoolAddress("a"), PoolAddress("b", "redis://h:1/0"))
    assert gateway().exit_code == 0
    usual = come_of(served, what)
    assert usual not in (of_variable, of_option)
    monkeypatch.setenv(variable(name), in_variable)
    assert gateway().exit_code == 0
    assert come_of(served, what) == of_variable
    assert gateway(option(name), in_option).exit_code == 0
    assert come_of(served, what) == of_option
    monkeypatch.setenv(variable(name), "")
    if name in GatewaySettings.never_empty:
        return
    assert gateway().exit_code == 0
    assert come_of(served, what) == usual


@pytest.mark.parametrize("name", GatewaySettings.never_empty)
@pytest.mark.parametrize("form", [str.upper, str.lower])
def test_an_empty_variable_of_what_keeps_others_out_is_refused(
    name: str, form: Callable[[str], str], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(form(variable(name)), "")
    for command in (["gateway"], ["page"]):
        told = CliRunner().invoke(app, command, env={"COLUMNS": "500"})
        assert (told.exit_code, served) == (EXIT_REFUSED, [])
        assert told.stderr.startswith(f"error: {variable(name)}='': empty")
        assert "unset it" in told.stderr
    # What the command line says comes before it.
    assert gateway(option(name), "/keys").exit_code == 0
    assert come_of(served, name) == Path("/keys")


def test_what_keeps_others_out_is_known_by_its_name() -> None:
    """One more such setting is to be refused where it is empty, too."""
    told = ("key", "password", "secret", "token", "tls", "ssl", "auth")
    for options in (ClientOptions, WorkerOptions, GatewaySettings):
        names = {name for name in options.model_fields if set(told) & {*name.split("_")}}
        names |= {name for name in options.model_fields if name.endswith("_keys")}
        assert names - {"key_requests"} == {*options.never_empty}


@pytest.mark.parametrize(("name", "value", "remedy"), BAD, ids=[f"{n}={v}" for n, v, _ in BAD])
def test_a_bad_variable_is_refused_by_its_name(
    name: str, value: str, remedy: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable(name), value)
    with pytest.raises(SettingsError) as refused:
        GatewaySettings()
    assert str(refused.value).startswith(f"{variable(name)}=")
    assert remedy in str(refused.value)
    told = gateway()
    assert (told.exit_code, served) == (78, [])
    assert told.stderr.startswith(f"error: {variable(name)}=")
    if name != "pool":  # which is given more than once, and not with blanks
        monkeypatch.setenv(variable(name), "")
        told = gateway(f"{option(name)}={value}")
        assert (told.exit_code, served) == (78, [])
        assert told.stderr.startswith(f"error: {name}=")
        assert remedy in told.stderr


def test_a_pool_is_that_of_all_commands_where_nothing_names_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway()
    assert served[-1][0].pools == (PoolAddress("default"),)
    monkeypatch.setenv("LMPOOL_POOL", "llama")
    gateway()
    assert served[-1][0].pools == (PoolAddress("llama"),)
    gateway("--pool", "a", "--pool", "b=unix:///run/some where")
    pools = (PoolAddress("a"), PoolAddress("b", "unix:///run/some where"))
    assert served[-1][0].pools == pools


def test_the_usual_options_are_those_of_the_command(served: Served) -> None:
    gateway()
    assert served[-1][0] == GatewayOptions((PoolAddress("default"),))


@pytest.mark.parametrize("host", ["::1", "no.host.invalid", "no..host"])
def test_one_pool_is_served_at_the_host_that_its_variable_names(
    host: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMPOOL_GATEWAY_HOST", host)
    serve_pool("redis://h:1/0", "p", lambda _: None)
    options, around = served[-1]
    assert options.pools == (PoolAddress("p", "redis://h:1/0"),)
    assert around["host"] == host


def test_no_message_and_no_repr_tells_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable("pool"), f"a=redis://u:{SECRET}@h/0")
    assert SECRET not in repr(GatewaySettings()) + str(GatewaySettings())
    for url in (f"redis://u:{SECRET}@h:port/0", f"http://u:{SECRET}@h", f"u:{SECRET}@h"):
        monkeypatch.setenv(variable("pool"), f"a={url}")
        with pytest.raises(SettingsError) as refused:
            GatewaySettings()
        assert str(refused.value).startswith(f"{variable('pool')}='a'")
        assert SECRET not in str(refused.value)


def test_a_mistyped_variable_is_refused_with_the_nearest(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=r"MAXN: did you mean LMPOOL_GATEWAY_MAX_N\?"):
        refuse_unknown_variables(["LMPOOL_GATEWAY_MAXN"])
    monkeypatch.setenv("LMPOOL_GATEWAY_TIME_OUT", "1")
    told = gateway()
    assert (told.exit_code, served) == (78, [])
    assert "did you mean LMPOOL_GATEWAY_TIMEOUT?" in told.stderr


def test_clients_and_workers_do_not_mind_a_gateways_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And are not told by them: it has a timeout of its own."""
    refuse_unknown_variables([variable(name) for name in GatewaySettings.model_fields])
    monkeypatch.setenv("LMPOOL_GATEWAY_TIMEOUT", "7")
    monkeypatch.setenv("LMPOOL_GATEWAY_POOL", "other")
    assert WorkerOptions().timeout != 7
    lm = lmpool.connect()
    lm.close()
    assert lm.pool == "default"


def test_names_of_pools_and_their_servers() -> None:
    assert pool_addresses(["a", "b=redis://h:1/0?db=2"]) == [
        ("a", None),
        ("b", "redis://h:1/0?db=2"),
    ]
    for bad in ("", "=redis://h", "a="):
        with pytest.raises(SettingsError, match="pool="):
            pool_addresses([bad])


def test_the_page_has_every_setting() -> None:
    table = section(GATEWAY.read_text("utf-8"), "settings")
    assert table == gateway_table(), "python -m tests.support.readme"

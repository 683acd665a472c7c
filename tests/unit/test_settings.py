from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lmpool
from lmpool.address import connection_pool
from lmpool.backends.options import check_types
from lmpool.cli.worker import read_options
from lmpool.errors import SettingsError
from lmpool.masking import mask_secrets
from lmpool.server_url import check_url, mask_url, place_of, worker_command
from lmpool.settings import ClientOptions, WorkerOptions, refuse_unknown_variables

Options = type[ClientOptions] | type[WorkerOptions]

BAD: list[tuple[Options, str, Any, str]] = [
    (ClientOptions, "pool", "a b", "write 1 to 64 letters"),
    (ClientOptions, "url", "localhost:6379", "write redis://"),
    (ClientOptions, "url", "http://localhost", "write redis://"),
    (ClientOptions, "url", "localhost:6379", "has no scheme"),
    (ClientOptions, "url", "redis+sentinl://h", "redis+sentinel://host:port/service/db or redis+"),
    (ClientOptions, "url", "r\u00e9dis://x", "unknown scheme 'r\u00e9dis'"),
    (ClientOptions, "url", "redis://", "names no host"),
    (ClientOptions, "url", "redis://host:0", "names no host"),
    (ClientOptions, "url", "redis://host:99999", "from 0 to 65535"),
    (ClientOptions, "url", "redis://host:port", "from 0 to 65535"),
    (ClientOptions, "url", "redis://host/first", "is no number"),
    (ClientOptions, "url", "redis://[::1", "malformed"),
    (ClientOptions, "url", "unix://", "names no socket"),
    (ClientOptions, "url", "unix://tmp/s", "names a host beside a socket: write unix:///path"),
    (ClientOptions, "url", " redis://h", "unknown scheme ' redis'"),
    (ClientOptions, "url", " redis+sentinel://h/s", "unknown scheme ' redis+sentinel'"),
    (WorkerOptions, "url", "Redis+Cluster://h", "unknown scheme 'Redis+Cluster'"),
    (WorkerOptions, "control_url", "REDIS://h", "unknown scheme 'REDIS'"),
    (WorkerOptions, "control_url", "http://localhost", "write redis://"),
    (ClientOptions, "control_url", "redis+cluster://h/3", "the database 0 alone"),
    (ClientOptions, "cache_bytes", "much", "512MiB"),
    (ClientOptions, "cache_bytes", -1, "0 for none"),
    (WorkerOptions, "near_bytes", "-5", "a number of bytes expected, such as 512MiB"),
    (WorkerOptions, "result_bytes", "5XB", "a number of bytes expected, such as 512MiB"),
    (ClientOptions, "encoding", "f64", "'f32', 'bf16' or 'f16'"),
    (ClientOptions, "framework", "jax", "'torch' or 'numpy'"),
    (ClientOptions, "request_timeout", 0, "greater than 0"),
    (ClientOptions, "request_timeout", "soon", "valid number"),
    (ClientOptions, "workers_timeout", -1, "greater than 0"),
    (ClientOptions, "workers_timeout", math.inf, "finite"),
    (ClientOptions, "reconnect_timeout", math.nan, "finite"),
    (ClientOptions, "when_busy", "shrug", "'wait' or 'raise'"),
    (WorkerOptions, "engine_opts", [1], "JSON"),
    (WorkerOptions, "dtype", "int8", "'float32', 'bfloat16' or 'float16'"),
    (WorkerOptions, "batch_size", 0, "greater than or equal to 1"),
    (WorkerOptions, "batch_size", "many", "valid integer"),
    (WorkerOptions, "batch_size", 1.5, "valid integer"),
    (WorkerOptions, "batch_size", 10**9, "less than or equal to 65536"),
    (WorkerOptions, "timeout", -0.1, "greater than or equal to 0"),
    (WorkerOptions, "timeout", 61, "less than or equal to 60"),
    (WorkerOptions, "max_batch_tokens", 0, "greater than or equal to 1"),
    (WorkerOptions, "max_prompt_tokens", 0, "greater than or equal to 1"),
    (WorkerOptions, "shards", 0, "greater than or equal to 1"),
    (WorkerOptions, "shards", 65, "less than or equal to 64"),
    (WorkerOptions, "max_backlog", 0, "greater than or equal to 1"),
    (WorkerOptions, "result_ttl", 0, "greater than 0"),
    (WorkerOptions, "replace", "perhaps", "boolean"),
    (WorkerOptions, "worker_name", "a b", "pattern"),
    (WorkerOptions, "drain_timeout", 0, "greater than 0"),
    (WorkerOptions, "log_format", "xml", "'text' or 'json'"),
    (WorkerOptions, "log_level", "loud", "'debug', 'info', 'warning' or 'error'"),
]
IDS = [f"{name}={value}" for _, name, value, _ in BAD]


@pytest.mark.parametrize(("options", "name", "value", "remedy"), BAD, ids=IDS)
def test_a_bad_argument_is_refused_by_name_value_and_remedy(
    options: Options, name: str, value: Any, remedy: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        options(**{name: value})
    message = str(refused.value)
    assert message.startswith(f"{name}=")
    assert str(value) in message
    assert remedy in message


@pytest.mark.parametrize(("options", "name", "value", "remedy"), BAD, ids=IDS)
def test_a_bad_variable_is_refused_by_name_value_and_remedy(
    options: Options, name: str, value: Any, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"LMPOOL_{name.upper()}"
    monkeypatch.setenv(variable, str(value))
    with pytest.raises(SettingsError) as refused:
        options()
    message = str(refused.value)
    assert message.startswith(f"{variable}=")
    assert str(value) in message
    assert remedy in message


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"shards": True}, r"shards=True: True and False are none of its values \(parts"),
        ({"result_ttl": False}, "result_ttl=False: True and False"),
        ({"model": "a\ud800"}, r"model='a\\ud800': write text in Unicode.*\(tiny, a folder"),
        ({"adapter_dirs": ["/a", "/\udc80"]}, r"adapter_dirs='/\\udc80': write text"),
        ({"revision": "a\0b"}, "revision=.*null characters"),
        ({"url": "redis://\ud800/0"}, "url=.*write text in Unicode"),
        ({"url": "redis://a..b/0"}, r"url='redis://a\.\.b/0': its host is no name of one"),
        ({"url": "redis+sentinel://a..b/s"}, "its host is no name of one"),
        ({"url": "unix:///tmp/%00"}, "has a null character"),
        pytest.param({"batch_size": 10**5000}, "batch_size=<int>", id="5,001 digits"),
    ],
)
def test_what_no_process_can_be_told_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        WorkerOptions(**given)


def test_several_mistakes_are_told_together() -> None:
    with pytest.raises(SettingsError, match=r"batch_size=0.*; shards=0"):
        WorkerOptions(batch_size=0, shards=0)


@pytest.mark.parametrize(
    ("name", "value", "example"),
    [
        ("engine_opts", "{bad", '\'{"device": "cpu"}\''),
        ("adapter_dirs", "/a:/b", "'[\"/srv/adapters\"]'"),
    ],
)
def test_a_variable_that_is_no_json_is_refused_with_an_example(
    name: str, value: str, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"LMPOOL_{name.upper()}"
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as refused:
        WorkerOptions()
    assert str(refused.value) == (
        f"{variable}={value!r} is not JSON: write for example {variable}={example}"
    )


def test_a_budget_below_the_longest_prompt_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"max_batch_tokens=10 is below .*=20: raise it to 20"):
        WorkerOptions(max_batch_tokens=10, max_prompt_tokens=20)
    WorkerOptions(max_batch_tokens=20, max_prompt_tokens=20)


def test_an_unknown_argument_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match="argument cache_byte: did you mean cache_bytes"):
        ClientOptions(cache_byte=3)
    with pytest.raises(SettingsError, match="did you mean batch_size"):
        WorkerOptions(batchsize=3)
    with pytest.raises(SettingsError, match=r"unknown argument zzz: there are .*pool"):
        lmpool.connect(zzz=1)


def test_an_unknown_variable_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match="LMPOOL_BATCHSIZE: did you mean LMPOOL_BATCH_SIZE"):
        refuse_unknown_variables(["HOME", "LMPOOL_BATCHSIZE"])
    with pytest.raises(SettingsError, match=r"LMPOOL_XYZZY: there are .*LMPOOL_URL"):
        refuse_unknown_variables(["LMPOOL_XYZZY"])
    refuse_unknown_variables(["HOME", "LMPOOL_URL", "LMPOOL_BATCH_SIZE", "LMPOOL_CACHE_BYTES"])
    refuse_unknown_variables(["LMPOOL_TEST_SERVER", "LMPOOL_REQUIRE_SERVERS"])


def test_connect_refuses_a_mistyped_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMPOOL_REQUESTTIMEOUT", "3")
    with pytest.raises(SettingsError, match="did you mean LMPOOL_REQUEST_TIMEOUT"):
        lmpool.connect()


def test_arguments_come_before_variables_and_those_before_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ClientOptions().pool == "default"
    monkeypatch.setenv("LMPOOL_POOL", "from-variable")
    assert ClientOptions().pool == "from-variable"
    assert ClientOptions(pool="argument").pool == "argument"
    assert ClientOptions(pool=None).pool == "from-variable"  # not given
    monkeypatch.setenv("LMPOOL_POOL", "")
    assert ClientOptions().pool == "default"


def test_values_as_a_shell_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "URL": "rediss://user:pass@[::1]:6380/2",
        "CACHE_BYTES": "1.5MiB",
        "BATCH_SIZE": "8",
        "TIMEOUT": "0",
        "REPLACE": "1",
        "ENGINE_OPTS": '{"device": "cpu", "threads": 2}',
        "ADAPTER_DIRS": '["/a", "/b c"]',
    }.items():
        monkeypatch.setenv(f"LMPOOL_{name}", value)
    assert ClientOptions().cache_bytes == 3 << 19
    worker = WorkerOptions()
    assert (worker.batch_size, worker.timeout, worker.replace) == (8, 0.0, True)
    assert worker.engine_opts == {"device": "cpu", "threads": 2}
    assert worker.adapter_dirs == ("/a", "/b c")


def test_options_do_not_change() -> None:
    options = ClientOptions()
    with pytest.raises(Exception, match="frozen"):
        options.pool = "other"  # type: ignore[misc]


def test_the_url_of_control_jobs_is_masked_and_that_of_the_pool_where_it_is_not_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ClientOptions(url="redis://h", control_url="redis://u:s3cret@c")
    assert options.control == "redis://u:s3cret@c"
    assert "control_url='redis://u:***@c'" in repr(options)
    assert WorkerOptions(url="redis://h").control == "redis://h"
    monkeypatch.setenv("LMPOOL_CONTROL_URL", "redis://u:s3cret@c:port")
    with pytest.raises(SettingsError, match=r"^LMPOOL_CONTROL_URL=redis://u:\*\*\*@c:port: "):
        ClientOptions()


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://localhost:6379",
        "redis://localhost:6379/15",
        "redis://user:pass@host:1/0",
        "rediss://[::1]:6380/0",
        "unix:///run/redis.sock",
        "unix://user:pass@/run/redis.sock?db=3",
        "redis://host:6379/0?password=x",
        "rediss://host?ssl_cert_reqs=none&ssl_check_hostname=False",
    ],
)
def test_addresses_of_servers(url: str) -> None:
    assert check_url(url) == url
    connection_pool(url).make_connection()  # redis-py takes it, too


# --- passwords ---------------------------------------------------------------------------------

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cret@h:1/0", "redis://:***@h:1/0"),
        ("redis://u:s3cret@h:1/0", "redis://u:***@h:1/0"),
        ("redis://u:s3cret@[::1]:1/0", "redis://u:***@[::1]:1/0"),
        ("redis://:s3cret&k=v@h/0", "redis://:***@h/0"),
        ("redis://u:s3cret?x=1@h:1/0", "redis://***"),
        ("redis://h?password=s3@cret&db=1", "redis://h?password=***&db=1"),
        ("redis://h?pass=s3@cret", "redis://h?pass=***"),
        ("redis://h?db=s3@cret", "redis://***"),
        ("redis://:s3cret@h?auth=s3cret&db=1", "redis://:***@h?auth=***&db=1"),
        ("redis://h:1/0?password=s3cret&db=1", "redis://h:1/0?password=***&db=1"),
        ("redis://h:1/0?db=1&password=s3cret", "redis://h:1/0?db=1&password=***"),
        ("redis://h?pass=s3cret&username=u", "redis://h?pass=***&username=u"),
        ("redis://h?PASSWORD=s3cret#x", "redis://h?PASSWORD=***#x"),
        ("redis+cluster://h?p%61ssword=s3cret", "redis+cluster://h?p%61ssword=***"),
        (
            "rediss://h?ssl_keyfile=/k&ssl_password=s3cret",
            "rediss://h?ssl_keyfile=/k&ssl_password=***",
        ),
        ("unix://:s3cret@/run/s?db=1", "unix://:***@/run/s?db=1"),
        ("redis://u@h", "redis://u@h"),
        ("redis://h", "redis://h"),
        ("unix:///run/s", "unix:///run/s"),
        # What should have been escaped.
        ("redis://u:s3cret/more@h:1/0", "redis://u:***@h:1/0"),
        ("redis://u:s3cret#more@h:1/0", "redis://u:***@h:1/0"),
        ("redis://u:s3cret?more@h:1/0", "redis://u:***@h:1/0"),
        ("redis://u:x@s3cret@h:1/0", "redis://u:***@h:1/0"),
        ("redis://:s3cret@[::1", "redis://:***@[::1"),
        ("u:s3cret@h", "u:***@h"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert mask_url(url) == shown


@given(
    password=st.text(min_size=1, max_size=12)
    | st.text("?&=@:/#x1", min_size=1, max_size=12)
    | st.sampled_from(["&=", "?=", "?x=1", "?db=1@x", "?password=@", "@?db=1@", "?a&db=@"])
)
def test_whatever_the_password_it_is_masked(password: str) -> None:
    secret = SECRET + password + SECRET
    for url in (
        f"redis://u:{secret}@h:1/0",
        f"unix://:{secret}@/run/s",
        f"redis://h?auth={quote(secret)}",
    ):
        assert SECRET not in mask_url(url)
        try:
            options = ClientOptions(url=url)
        except SettingsError as error:
            told = str(error)
        else:
            told = repr(options) + str(options)
        assert SECRET not in told


@pytest.mark.parametrize(
    ("url", "written"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("unix:///p?db=2", "'unix:///p?db=2'"),
        (f"redis://u:{SECRET}@h:1/0", "'redis://u:***@h:1/0'"),
    ],
)
def test_a_command_that_is_advised_names_the_server_and_the_pool(url: str, written: str) -> None:
    assert worker_command(url, "p") == f"lmpool worker --url {written} --pool p"


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:s3cret@h:port/0",
        "redis://u:s3cret@",
        "redis://u:s3cret/x@h/0",
        "redis://u:s3cret@[::1/0",
        "http://u:s3cret@h/0",
        "u:s3cret@h/0",
        "redis://h/zero?password=s3cret",
        "redis://u:s3cret@h:1/zero",
    ],
)
def test_no_message_tells_the_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (ClientOptions, WorkerOptions):
        with pytest.raises(SettingsError) as refused:
            options(url=url)
        assert SECRET not in str(refused.value)
        assert refused.value.__cause__ is None
    monkeypatch.setenv("LMPOOL_URL", url)
    with pytest.raises(SettingsError) as refused:
        ClientOptions()
    assert SECRET not in str(refused.value)


def test_no_repr_tells_the_password() -> None:
    url = "redis://u:s3cret@h:1/0"
    lm = lmpool.connect(url, "p")
    try:
        for shown in (repr(lm), str(lm), repr(lm.options), str(lm.options), f"{lm.options}"):
            assert SECRET not in shown
            assert "***" in shown
        assert lm.url == url  # what another process needs to connect
    finally:
        lm.close()


SECRETS = {
    "model_kwargs": {
        "token": "s3cret-1",
        "tokens": ["s3cret-2", ["s3cret-3"]],
        "auth": {"password": {"a": "s3cret-4", "b": [{"c": "s3cret-5"}]}},
        "API_KEY": ("s3cret-6",),
        "at": "https://u:s3cret-7@h/x",
        "max_tokens": 5,
        "use_token": True,
        "key": None,
        "device": "cpu",
    }
}


def test_below_a_secret_name_no_text_is_shown() -> None:
    assert mask_secrets(SECRETS) == {
        "model_kwargs": {
            "token": "***",
            "tokens": ["***", ["***"]],
            "auth": {"password": {"a": "***", "b": [{"c": "***"}]}},
            "API_KEY": ["***"],
            "at": "https://u:***@h/x",
            "max_tokens": 5,
            "use_token": True,
            "key": None,
            "device": "cpu",
        }
    }


def test_no_secret_of_an_engine_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a repr nor in an error, whatever is wrong."""
    options = WorkerOptions(engine_opts=SECRETS)
    assert options.engine_opts == SECRETS
    said = [repr(options), str(options)]
    for wrong in ([SECRETS], json.dumps([SECRETS])):
        with pytest.raises(SettingsError) as refused:
            WorkerOptions(engine_opts=wrong)  # type: ignore[arg-type]
        said.append(str(refused.value))
    for text in (json.dumps(SECRETS)[:-1], json.dumps([SECRETS])):
        monkeypatch.setenv("LMPOOL_ENGINE_OPTS", text)
        with pytest.raises(SettingsError) as refused:
            WorkerOptions()
        said.append(str(refused.value))
    with pytest.raises(SettingsError) as refused:
        read_options({"engine_opts": json.dumps(SECRETS)[:-1]})
    said.append(str(refused.value))
    for text in said:
        assert "s3cret" not in text
        assert "***" in text


def test_no_part_of_a_password_with_a_slash_is_shown() -> None:
    with pytest.raises(SettingsError) as refused:
        ClientOptions(url="redis://user:12/secret@host/0")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://host/0?foo=1", "unknown option 'foo'; there are db"),
        ("redis://host/0?protocol=3", "unknown option 'protocol'"),
        ("redis://host/0?decode_responses=1", "unknown option"),
        ("redis://host/0?ssl_ca_certs=/ca", "unknown option"),
        ("redis://host?db=x", "db is no number"),
        ("unix:///s?db=", "db is no number"),
        ("rediss://host?health_check_interval=soon", "health_check_interval is no number"),
        ("rediss://host?ssl_cert_reqs=None", "ssl_cert_reqs is one of none, optional, required"),
        ("rediss+cluster://host?ssl_check_hostname=off", "ssl_check_hostname is one of true, fal"),
    ],
)
def test_options_of_a_url_that_cannot_be_used(url: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        ClientOptions(url=url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://host/0?health_check_interval=10",
        "unix:///s?db=3&password=secret",
        "rediss://host:1/0?ssl_ca_certs=/ca&ssl_cert_reqs=required",
    ],
)
def test_options_of_a_url_that_can(url: str) -> None:
    assert ClientOptions(url=url).url == url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:p@host:1/2", "redis://host:1/2"),
        ("redis://:p?a/b@host:1/0?protocol=2", "redis://host:1/0"),
        ("redis://host:1/0?password=a@b", "redis://host:1/0"),
        ("rediss+cluster://u:p@a:1,b:2/?ssl_ca_certs=/x", "rediss+cluster://a:1,b:2"),
        ("unix://u:p%40@/run/redis?db=1", "unix:///run/redis"),
        ("redis://host", "redis://host"),
    ],
)
def test_the_place_of_a_url_has_no_secrets(url: str, shown: str) -> None:
    assert place_of(url) == shown


def test_a_secret_of_the_wrong_type_is_not_shown() -> None:
    def taker(hf_token: str | None = None, block_size: int = 1) -> None:
        del hf_token, block_size

    with pytest.raises(SettingsError) as refused:
        check_types("engine_opts", {"hf_token": [SECRET]}, taker)
    assert SECRET not in str(refused.value)
    assert "hf_token=['***']" in str(refused.value)
    with pytest.raises(SettingsError, match="block_size='many': int expected"):
        check_types("engine_opts", {"block_size": "many"}, taker)

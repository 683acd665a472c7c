"""Where a server is, as settings say it: what is a URL of one, and what of it others may see."""

from __future__ import annotations

import re
import shlex
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from lmpool.address import CLUSTER_SCHEMES, SENTINEL_SCHEMES, Cluster, Sentinels
from lmpool.errors import SettingsError

SCHEMES = ("redis", "rediss", "unix", *SENTINEL_SCHEMES, *CLUSTER_SCHEMES)
SEVERAL_HOSTS: Final[dict[str, tuple[type[Sentinels] | type[Cluster], str]]] = {
    **dict.fromkeys(
        SENTINEL_SCHEMES,
        (Sentinels, "redis+sentinel://[user:password@]host:port[,host:port...]/service[/db]"),
    ),
    **dict.fromkeys(
        CLUSTER_SCHEMES, (Cluster, "redis+cluster://[user:password@]host:port[,host:port...]")
    ),
}
"""Who reads the URLs of these schemes, and how they are written."""
URL_OPTIONS = ("db", "username", "password", "health_check_interval")
TLS_OPTIONS = (
    "ssl_ca_certs", "ssl_ca_data", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname",
    "ssl_keyfile",
)  # fmt: skip
_SHOWN: Final = {*URL_OPTIONS, *TLS_OPTIONS} - {"password"}
"""Options of a URL that are no secret: under any other name there may be a password."""
_OPTION: Final = re.compile(r"([?&]([^=&#]*)=)[^&#]*")
_VALUES: Final = {
    "ssl_cert_reqs": ("none", "optional", "required"),
    "ssl_check_hostname": (
        *("true", "false", "yes", "no", "t", "f", "y", "n", "1", "0"),
        *("True", "False", "Yes", "No", "TRUE", "FALSE", "YES", "NO", "T", "F", "Y", "N"),
    ),
}
"""What TLS options may say, as redis-py reads it."""


def mask_url(url: str) -> str:
    """`url` with its password as ``***``, fit for logs and messages, even where it is malformed."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    place, mark, query = rest.partition("?")
    behind = "@" in query and "=" in query.rpartition("@")[0]  # an option's value, it seems
    if behind and not _is_query(place, query):
        return f"{scheme}{separator}***"  # of a password, or of an option: who knows which
    # Up to the last @: a password may hold what should have been escaped.
    login, at, address = (place if behind else rest).rpartition("@")
    if ":" in login:
        login = f"{login.partition(':')[0]}:***"
    address += mark + query if behind else ""
    return scheme + separator + login + at + re.sub(_OPTION, _masked_option, address)


def _is_query(place: str, query: str) -> bool:
    """Whether options stand behind a server's place, with an @ in none but what is masked."""
    options = [option.partition("=") for option in query.split("&")]
    return (
        ("@" in place or not re.search(r":(?!\d*(/|$))", place))
        and "#" not in query
        and all(
            equals and "@" not in name and not ("@" in value and name in _SHOWN)
            for name, equals, value in options
        )
    )


def _masked_option(found: re.Match[str]) -> str:
    return found[0] if found[2] in _SHOWN else f"{found[1]}***"


def place_of(url: str) -> str:
    """`url` without user, password and options: what others may see of it."""
    scheme, separator, rest = mask_url(url).partition("://")
    return scheme + separator + rest.rpartition("@")[2].partition("?")[0].rstrip("/")


def worker_command(url: str, pool: str) -> str:
    """The command that starts a worker of a pool; a password in it is to be written again."""
    return shlex.join(["lmpool", "worker", "--url", mask_url(url), "--pool", pool])


def check_url(url: str) -> str:
    """`url` itself, or `SettingsError` if it is no server's address."""
    shown = mask_url(url)
    if "%00" in url:
        raise SettingsError(f"url={shown!r} has a null character: leave %00 out")
    remedy = (
        "write redis://[user:password@]host:port/db, rediss://... (TLS), unix:///path?db=0, "
        "redis+sentinel://host:port/service/db or redis+cluster://host:port"
    )
    scheme, separator, _ = url.partition("://")
    if separator and scheme in SEVERAL_HOSTS:
        kind, form = SEVERAL_HOSTS[scheme]
        try:
            known = kind.parse(url)
        except ValueError as error:
            raise SettingsError(f"url={shown!r}: {error}; write {form}") from None
        for host, _ in known.hosts:
            _check_host(host, shown, remedy)
        _check_url_options(url, shown, known.tls, remedy)
        return url
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # The message of urlsplit may quote the password.
        reason = "its port is no number from 0 to 65535" if "ort" in str(error) else "malformed"
        raise SettingsError(f"url={shown}: {reason}; {remedy}") from None
    if not separator:
        raise SettingsError(f"url={shown!r} has no scheme; {remedy}")
    if scheme not in SCHEMES:  # as it is written: urlsplit drops blanks and makes letters small
        raise SettingsError(f"url={shown!r}: unknown scheme {scheme!r:.60}; {remedy}")
    _check_url_options(url, shown, scheme == "rediss", remedy)
    if scheme == "unix":
        if not parts.path:
            raise SettingsError(f"url={shown!r} names no socket; {remedy}")
        if parts.hostname:
            raise SettingsError(f"url={shown!r} names a host beside a socket: write unix:///path")
        return url
    if not parts.hostname or port == 0:
        raise SettingsError(f"url={shown!r} names no host and port; {remedy}")
    _check_host(unquote(parts.hostname), shown, remedy)
    database = parts.path.lstrip("/")
    if database and not database.isdigit():
        raise SettingsError(f"url={shown!r}: its database is no number; {remedy}")
    return url


def _check_host(host: str, shown: str, remedy: str) -> None:
    try:
        host.encode("idna")  # as it is looked up
    except UnicodeError:
        raise SettingsError(f"url={shown!r}: its host is no name of one; {remedy}") from None


def _check_url_options(url: str, shown: str, tls: bool, remedy: str) -> None:
    known = URL_OPTIONS + (TLS_OPTIONS if tls else ())
    query = url.partition("?")[2].partition("#")[0]
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            # Behind a "?" in a password that is not percent-encoded stands the rest of it.
            what = "unknown options" if "@" in query else f"unknown option {name!r:.60}"
            raise SettingsError(
                f"url={shown!r}: {what}; there are {', '.join(known)}"
                + ("; percent-encode a password's characters" if "@" in query else "")
            )
        if name in ("db", "health_check_interval") and not value.isdecimal():
            raise SettingsError(f"url={shown!r}: {name} is no number; {remedy}")
        if value not in _VALUES.get(name, (value,)):
            raise SettingsError(f"url={shown!r}: {name} is one of {', '.join(_VALUES[name])}")

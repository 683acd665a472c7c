"""API keys: as a file has them, hashed, and read again when it changes.

A line is a name, ``sha256:`` and the hash of a key, and may end with ``requests=N``, how many
requests that key may have at once, and with ``operator``, by which it may do on the live page what
changes the pool. Empty lines and those that begin with ``#`` say nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmpool.checks import is_text, quoted, said
from lmpool.errors import SettingsError

logger = logging.getLogger(__name__)

PREFIX: Final = "lmpool-"
LOOK: Final = 1.0
"""Seconds between two looks whether the file has changed."""
MAX_FILE_BYTES: Final = 16 << 20
MAX_REQUESTS: Final = 999_999_999
"""That a line's bound may be: nine digits."""
_LINE: Final = re.compile(
    r"(?P<name>[^\s#]\S*)\s+sha256:(?P<hash>[0-9a-fA-F]{64})"
    r"(?:\s+requests=(?P<requests>[1-9]\d{0,8}))?(?P<operator>\s+operator)?"
)


@dataclass(frozen=True, slots=True)
class Key:
    """One that may ask. `requests`: how many it may have at once; None as the gateway says.

    `operator`: whether it may retry and drop dead letters.
    """

    name: str
    digest: bytes
    requests: int | None = None
    operator: bool = False


def new_key() -> str:
    """A key that nobody guesses."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: bytes) -> bytes:
    """What is kept of a key. Keys are long and random: nothing slower is needed."""
    return hashlib.sha256(key).digest()


def line(name: str, key: str, requests: int | None = None, *, operator: bool = False) -> str:
    """The line of a key in the file."""
    if not re.fullmatch(r"[^\s#]\S*", name) or not is_text(name):
        raise SettingsError(f"name={quoted(name)}: write a name in UTF-8, without spaces")
    if not is_text(key):
        raise SettingsError("a key that is no text in UTF-8: write another")
    if requests is not None and not 1 <= requests <= MAX_REQUESTS:
        raise SettingsError(f"requests={requests}: write a number from 1 to {MAX_REQUESTS}")
    bound = f" requests={requests}" if requests else ""
    return f"{name} sha256:{digest(key.encode()).hex()}{bound}" + (" operator" if operator else "")


def parse(text: str, path: Path) -> tuple[Key, ...]:
    """The keys of a file's text. Raises `SettingsError`, which never shows what may be a key."""
    keys = []
    for number, written in enumerate(text.splitlines(), 1):
        stripped = written.strip()
        if not stripped or stripped.startswith("#"):
            continue
        found = _LINE.fullmatch(stripped)
        if found is None:
            raise SettingsError(
                f"{path}, line {number}: write NAME sha256:HASH, and requests=N if so many at once "
                "are to be its bound, and operator if it may change the pool; lmpool gateway-key "
                "makes a key and its line"
            )
        most = found["requests"]
        keys.append(
            Key(
                found["name"],
                bytes.fromhex(found["hash"]),
                None if most is None else int(most),
                found["operator"] is not None,
            )
        )
    return tuple(keys)


class KeyFile:
    """The keys of a file. One that becomes unreadable leaves those that were read before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._looked = time.monotonic()
        self._wrong = ""
        self._keys = self._read()

    def find(self, given: bytes) -> Key | None:
        """The key that was given, compared with each in the same time."""
        self._look()
        asked, found = digest(given), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, asked):
                found = key
        return found

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        try:
            if self._stamped() != self._stamp:
                self._keys = self._read()
                logger.info("%s: %d API keys", self._path, len(self._keys))
            self._wrong = ""
        except (SettingsError, OSError) as error:
            if str(error) != self._wrong:  # once, however long it goes on
                logger.error("the API keys are as before: %s", error)
            self._wrong = str(error)

    def _stamped(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[Key, ...]:
        try:
            stamp = self._stamped()
            with self._path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise SettingsError(
                    f"api_keys={str(self._path)!r}: more than {MAX_FILE_BYTES} bytes"
                )
            keys = parse(data.decode("utf-8-sig"), self._path)
            self._stamp = stamp  # not before: what could not be read is read again
            return keys
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"api_keys={str(self._path)!r} cannot be read ({said(error)}): write the path of a "
                "file with a line for each key"
            ) from None


def given_key(authorization: bytes | None) -> bytes | None:
    """The key of an ``Authorization`` header: a Bearer token, or the password of Basic."""
    if authorization is None:
        return None
    scheme, _, rest = authorization.strip().partition(b" ")
    rest = rest.strip()
    match scheme.lower():
        case b"bearer":
            return rest or None
        case b"basic":
            try:
                login = base64.b64decode(rest, validate=True)
            except (binascii.Error, ValueError):
                return None
            return login.partition(b":")[2] or None
        case _:
            return None

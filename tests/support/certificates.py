"""Certificates of servers on this machine that speak TLS."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import trustme

T = TypeVar("T")


@contextmanager
def where_tls_is_spoken(servers: AbstractContextManager[T]) -> Iterator[T]:
    """Servers, started; the test is skipped where theirs speak no TLS."""
    try:
        started = servers.__enter__()
    except RuntimeError as error:
        if re.search("Bad directive|TLS support", str(error)):
            pytest.skip("this server speaks no TLS")
        raise
    try:
        yield started
    finally:
        servers.__exit__(None, None, None)


def certificates(folder: Path) -> dict[str, str]:
    """Make some in `folder`; the directives of a server that uses them."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "::1", "localhost")
    trusted, key, chain = folder / "ca.pem", folder / "key.pem", folder / "chain.pem"
    authority.cert_pem.write_to_path(str(trusted))
    issued.private_key_pem.write_to_path(str(key))
    issued.cert_chain_pems[0].write_to_path(str(chain))
    return {
        "tls_cert_file": str(chain),
        "tls_key_file": str(key),
        "tls_ca_cert_file": str(trusted),
        "tls_auth_clients": "no",
    }

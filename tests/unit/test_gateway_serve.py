"""How a gateway listens."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from lmpool.errors import SettingsError
from lmpool.gateway.door import PART, STALL
from lmpool.gateway.serve import SEND_BYTES, listen
from lmpool.monitoring.server import MonitoringServer

SLOWEST = 8192
"""Bytes a second at which a reader is not taken to be gone."""


def test_a_slow_reader_is_seen_to_read() -> None:
    """The system tells of room once a third of its buffer is free, twice what was asked for."""
    listener = listen("127.0.0.1", 0)
    with closing(listener), socket.create_connection(listener.getsockname()):
        taken, _ = listener.accept()
        with taken:
            held = taken.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert held == 2 * SEND_BYTES
    assert (held / 3 + PART) / STALL < SLOWEST


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("no.host.invalid", 0, r"\(no host of that name is known\): write an address of this ma"),
        ("192.0.2.1", 0, r"\(Cannot assign requested address\): write an address of this machine"),
        ("127.0.0.1", None, r"\(Address already in use\): stop what does, or write another port"),
    ],
)
def test_a_wrong_host_is_told_from_a_port_in_use(host: str, port: int | None, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1] if port is None else port
        message = rf"^host='{host}', port={number}: cannot listen there {said}"
        with pytest.raises(SettingsError, match=message) as refused:
            listen(host, number)
        with pytest.raises(SettingsError) as of_metrics:
            MonitoringServer(lambda *_: [], host, number).listen()
    assert str(refused.value) == str(of_metrics.value)
    assert str(refused.value).count(f"{host}'") == 1

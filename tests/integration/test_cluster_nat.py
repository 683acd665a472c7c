"""Clusters behind a NAT: nodes announce what clients reach, and that is not where they listen; and
nodes that announce what nobody reaches."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, cast

import numpy as np
import pytest
from typer.testing import CliRunner

from lmpool import inspection
from lmpool.backends.mock import mock_row
from lmpool.cli import app
from lmpool.errors import LmpoolError, ServerUnreachable
from lmpool.slots import slot_of
from lmpool.wants import Row
from tests.support.certificates import certificates, where_tls_is_spoken
from tests.support.clients import connected
from tests.support.cluster import Cluster
from tests.support.ports import BUS
from tests.support.proxy import Proxy
from tests.support.waiting import until
from tests.support.workers import in_process_worker, worker_process

VOCAB: Final = 256
INSIDE: Final = "127.0.0.2"
"""Where nodes listen. Nothing that clients are given or told names it."""
OUTSIDE: Final = "127.0.0.1"
"""What they announce, with other ports."""
FORWARDED: Final = "127.0.0.3"
"""Where what is forwarded comes from, as nodes see it."""
PATIENT: Final = 15.0
"""Seconds after which nodes miss one another where none is to be missed, however busy the machine
that forwards what they say."""
PROMPTS: Final = [[i % VOCAB, i // VOCAB] for i in range(600)]


@contextmanager
def behind_nat(
    primaries: int = 3,
    replicas: int = 0,
    *,
    tls: dict[str, str] | None = None,
    node_timeout: float = PATIENT,
) -> Iterator[tuple[Cluster, str]]:
    """Such a cluster, and its URL for clients."""
    with ExitStack() as stack:
        ports: list[int] = []

        def announce(port: int) -> dict[str, str]:
            for_clients, for_nodes = (
                stack.enter_context(Proxy(port + more, host=INSIDE, source=FORWARDED))
                for more in (0, BUS)
            )
            ports.append(for_clients.port)
            return {
                "cluster_announce_ip": OUTSIDE,
                "cluster_announce_port" if tls is None else "cluster_announce_tls_port": str(
                    for_clients.port
                ),
                "cluster_announce_bus_port": str(for_nodes.port),
            }

        cluster = Cluster(
            primaries,
            replicas,
            node_timeout=node_timeout,
            host=INSIDE,
            tls=tls,
            announce=announce,
            cluster_require_full_coverage="no",
            protected_mode="no",  # which would take what is forwarded for the world
        )
        cluster = stack.enter_context(where_tls_is_spoken(cluster))
        seeds = ",".join(f"{OUTSIDE}:{port}" for port in ports[:2])
        query = "" if tls is None else f"?ssl_ca_certs={tls['tls_ca_cert_file']}"
        yield cluster, f"{'redis' if tls is None else 'rediss'}+cluster://{seeds}/{query}"


def come_from(cluster: Cluster) -> set[str]:
    """The addresses that lmpool's connections come from, as all nodes see them."""
    found = set()
    for node in cluster.running:
        with node.client() as client:
            for each in cast(list[dict[str, str]], client.client_list()):
                if each["name"].startswith("lmpool"):
                    found.add(each["addr"].rpartition(":")[0])
    return found


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_pool_is_served_behind_a_nat(
    tls: bool,
    server_binary: str,
    tmp_path: Path,
    pool_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lmpool.diagnosis.SLOW", 60.0)  # of how long this machine takes
    with (
        behind_nat(tls=certificates(tmp_path) if tls else None) as (cluster, url),
        worker_process(url, pool_name, shards=6),
        connected(url, pool_name, cache_bytes=0) as lm,
    ):
        rows = lm.batch_next_token_logprobs_sync(PROMPTS)
        for prompt, row in zip(PROMPTS, rows, strict=True):
            np.testing.assert_allclose(row, mock_row(prompt, VOCAB), atol=1e-5)
        lm.clear_kv_cache(timeout=60)  # a control job
        assert come_from(cluster) == {FORWARDED}

        def is_well() -> bool:
            found = inspection.diagnose(url, pool_name)
            return not [each for each in found if each.level == "wrong"]

        until(is_well, what="every node to be found well", every=0.5)
        # A slot moves: whoever asks its former node is told what the other announces.
        shard = lm.shards[0]
        owner = cluster.owner(shard.slot)
        target = next(node for node in cluster.primaries() if node is not owner)
        cluster.move_slot(shard.slot, target)
        assert lm.batch_next_token_logprobs_sync(PROMPTS, timeout=60).shape == (600, VOCAB)
        assert come_from(cluster) == {FORWARDED}


def test_a_failover_behind_a_nat(server_binary: str, pool_name: str) -> None:
    with (
        behind_nat(3, 1, node_timeout=1.0) as (cluster, url),
        in_process_worker(url, pool_name),
        connected(url, pool_name, cache_bytes=0) as lm,
    ):
        cluster.wait_until_ok()  # this process forwards, and may have stood still for a second
        node = cluster.owner(lm.shards[0].slot)
        node.kill()
        rows = lm.batch_next_token_logprobs_sync(PROMPTS, timeout=60)
        np.testing.assert_allclose(rows[0], mock_row(PROMPTS[0], VOCAB), atol=1e-5)
        cluster.wait_for_failover(lm.shards[0].slot, node)
        assert come_from(cluster) == {FORWARDED}


# --- what is announced leads nowhere -------------------------------------------------------------


@contextmanager
def misled(nowhere: set[int], *, announced: int = 1) -> Iterator[Cluster]:
    """Three primaries, of which those of these numbers announce that port for clients."""
    told: list[int] = []

    def announce(port: int) -> dict[str, str]:
        told.append(port)
        if len(told) - 1 not in nowhere:
            return {}
        ports = {"cluster_announce_port": announced, "cluster_announce_bus_port": port + BUS}
        return {name: str(number) for name, number in ports.items()}

    with Cluster(
        3, node_timeout=PATIENT, announce=announce, cluster_require_full_coverage="no"
    ) as cluster:
        yield cluster


def says_what_to_do(error: BaseException, port: int = 1) -> None:
    """The address that nobody reaches, and what to write."""
    text = str(error)
    assert re.search(rf"127\.0\.0\.1:{port}\b", text), text
    assert "cluster-announce-ip" in text, text
    assert "lmpool doctor" in text, text


def test_all_addresses_lead_nowhere(server_binary: str, pool_name: str) -> None:
    with misled({0, 1, 2}) as cluster:
        with (
            pytest.raises(ServerUnreachable) as caught,
            connected(cluster.url, pool_name, reconnect_timeout=1.0),
        ):
            pass
        says_what_to_do(caught.value)
        with worker_process(cluster.url, pool_name, alive=False) as worker:
            until(lambda: "127.0.0.1:1" in worker.log, what="the worker to say why")
        said = CliRunner().invoke(app, ["doctor", "--url", cluster.url, "--pool", pool_name])
        assert said.exit_code == 1
        assert "127.0.0.1:1" in said.output
        assert "cluster-announce-ip" in said.output


def test_all_addresses_are_silent(server_binary: str, pool_name: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        port = full.getsockname()[1]
        stack.enter_context(socket.create_connection(("127.0.0.1", port)))  # others wait for it
        with (
            misled({0, 1, 2}, announced=port) as cluster,
            pytest.raises(ServerUnreachable) as caught,
            connected(cluster.url, pool_name, reconnect_timeout=1.0),
        ):
            pass
        says_what_to_do(caught.value, port)


def test_one_address_leads_nowhere(server_binary: str, pool_name: str) -> None:
    """Shards elsewhere are served; those of that node fail by an error that says what to do."""
    with misled({1}) as cluster:
        lost = cluster.nodes[1]
        slots = set(cluster.slots(lost))
        name = next(
            f"{pool_name}-{n}" for n in range(99) if slot_of(f"lmpool:{pool_name}-{n}") not in slots
        )
        with (
            in_process_worker(cluster.url, name, shards=6),
            connected(cluster.url, name, cache_bytes=0, reconnect_timeout=2.0) as lm,
        ):
            place = lm.info.placement()
            away = {shard.number for shard in lm.shards if shard.slot in slots}
            assert away
            found = lm.sync.ask_many([(prompt, Row()) for prompt in PROMPTS], errors="return")
            for prompt, answer in zip(PROMPTS, found, strict=True):
                number, _ = place.of(np.array(prompt, "<u4").tobytes(), None)
                if number in away:
                    assert isinstance(answer, LmpoolError)
                    says_what_to_do(answer)
                else:
                    row = cast(np.ndarray, answer)
                    np.testing.assert_allclose(row, mock_row(prompt, VOCAB), atol=1e-5)

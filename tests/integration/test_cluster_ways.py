"""The ways to a cluster: TLS, users, IPv6, announced names; and what stands in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import ServerRefused, ServerUnreachable
from tests.support.certificates import certificates, where_tls_is_spoken
from tests.support.clients import connected
from tests.support.cluster import Cluster
from tests.support.workers import in_process_worker

VOCAB = 256
PATIENT = {"node_timeout": 15.0}
"""No node is to be missed here, however busy the machine."""


@pytest.fixture(autouse=True)
def _at_any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that is slow to answer given up."""
    monkeypatch.setattr("lmpool.cluster_servers.ANSWER_WITHIN", 60.0)


def assert_serves(url: str, pool: str) -> None:
    """A worker and a client find all nodes: prompts of every shard are answered."""
    prompts = [[i % VOCAB, i // VOCAB] for i in range(600)]
    with in_process_worker(url, pool), connected(url, pool, cache_bytes=0) as lm:
        rows = lm.batch_next_token_logprobs_sync(prompts)
        for prompt, row in zip(prompts, rows, strict=True):
            np.testing.assert_allclose(row, mock_row(prompt, VOCAB), atol=1e-5)
        pieces = list(lm.sync.stream([1, 2], max_tokens=5, eos_token_ids=[]))
        piece_tokens = [token for piece in pieces for token in piece.token_ids]
        assert len(piece_tokens) == 5
        assert lm.pool_statistics_sync()["computed"] == 601


def options(tmp_path: Path, kind: str) -> dict[str, Any]:
    match kind:
        case "tls":
            return {"tls": certificates(tmp_path)}
        case "ipv6":
            return {"host": "::1"}
        case "names":
            return {
                "announce": lambda port: {"cluster_announce_hostname": "localhost"},
                "cluster_preferred_endpoint_type": "hostname",
            }
        case "no endpoints":
            return {"cluster_preferred_endpoint_type": "unknown-endpoint"}
        case _:
            return {"users": "user someone on >it's@secret ~* &* +@all\n"}


@pytest.mark.parametrize("kind", ["tls", "ipv6", "names", "no endpoints", "users"])
def test_a_pool_is_served(kind: str, server_binary: str, tmp_path: Path, pool_name: str) -> None:
    with where_tls_is_spoken(Cluster(3, **PATIENT, **options(tmp_path, kind))) as cluster:
        url = cluster.url
        if kind == "users":
            url = cluster.url_of("someone", "it's%40secret")
        assert_serves(url, pool_name)


def test_one_seed_that_lives_is_enough(server_binary: str, pool_name: str) -> None:
    with Cluster(3, **PATIENT) as cluster:
        last = cluster.nodes[-1].cluster_port
        assert_serves(f"redis+cluster://127.0.0.1:1,127.0.0.1:{last}", pool_name)


def test_a_refused_password_is_said_and_not_shown(server_binary: str) -> None:
    with Cluster(3, users="user someone on >secret ~* &* +@all\n") as cluster:
        with (
            pytest.raises(ServerRefused, match="user or password") as caught,
            lmpool.connect(cluster.url_of("someone", "wrong"), pool="p") as lm,
        ):
            lm.next_token_logprobs_sync([1])
        assert "wrong" not in str(caught.value)


def test_no_node_there_is_said(pool_name: str) -> None:
    with (
        pytest.raises(ServerUnreachable, match=r"redis\+cluster://127.0.0.1:1,127.0.0.1:2"),
        lmpool.connect("redis+cluster://127.0.0.1:1,127.0.0.1:2", pool=pool_name) as lm,
    ):
        lm.next_token_logprobs_sync([1], timeout=5)

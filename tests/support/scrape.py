"""Reading ``/metrics``, ``/health`` and ``/ready`` as a scraper does."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

Sample = tuple[str, dict[str, str]]


def get(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    """Status and body of what a process on this machine answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def status(port: int, path: str = "/ready") -> tuple[int, dict[str, Any]]:
    """The same of what is JSON; 0 where nobody listens."""
    try:
        code, body = get(port, path)
    except OSError:
        return 0, {}
    return code, json.loads(body)


class Scrape:
    """What one look at ``/metrics`` brought."""

    def __init__(self, port: int) -> None:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
            self.text = response.read().decode()
        self.families = {each.name: each for each in text_string_to_metric_families(self.text)}

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Name, labels and value of each."""
        for found in self.families.values():
            for sample in found.samples:
                yield sample.name, sample.labels, sample.value

    def value(self, name: str, **labels: str) -> float | None:
        """That of the one sample of this name that has these labels; None without one."""
        found = [
            value
            for sample, known, value in self.samples()
            if sample == name and labels.items() <= known.items()
        ]
        assert len(found) < 2, f"several samples of {name} with {labels}"
        return found[0] if found else None

"""A server for the tests of a session, and no workers: those are in the tests' own process."""

from __future__ import annotations

import time
from typing import Final, Self

from lmpool.errors import PoolTimeout
from lmpool.producer.embedded.private_pool import PrivatePool

START_TIMEOUT: Final = 30.0


class PrivateServer(PrivatePool):
    """That of an embedded pool, which ends with this process, however that ends."""

    def __init__(self) -> None:
        # A launcher that has something to say, and no worker to start.
        super().__init__("testing", ["--help"], {"drain_timeout": 0.0})

    def __enter__(self) -> Self:
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            events = self._events()
            if any(event["event"] == "server ready" for event in events):
                return
            self._check_processes(events)
            if time.monotonic() >= deadline:
                raise PoolTimeout(f"the private server does not answer after {START_TIMEOUT:g} s")
            time.sleep(0.01)

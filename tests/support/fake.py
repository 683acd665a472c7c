"""fakeredis on a loopback port: what users test with, too."""

from __future__ import annotations

from lmpool.testing.fake_server import FakeServer

__all__ = ["FakeServer"]

"""A client's reply stream holds the notices whose answers it has yet to fetch."""

from __future__ import annotations

from lmpool.commands import Server
from lmpool.producer.session import Session


def take_off(server: Server, reply: str, session: Session) -> None:
    """Remove from a reply stream what was read and fetched."""
    taken = session.taken_ids.get(reply)
    if taken is not None:
        ms, _, number = taken.partition("-")
        server.xtrim(reply, minid=f"{ms}-{int(number) + 1}", approximate=False)

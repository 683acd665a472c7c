"""TLS for a server that was built without it: a process of its own ends it in front of the server.

Run as ``python -m tests.support.tls LISTENS SERVES CERTIFICATE``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys

CHUNK = 1 << 16


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK):
            target.write(data)
            await target.drain()
    target.close()


async def serve(listens: int, serves: int, certificate: str) -> None:
    """Pass connections of TLS on a loopback port on to another port, forever."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection("127.0.0.1", serves)
        await asyncio.gather(_pass_on(reader, behind[1]), _pass_on(behind[0], writer))

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    server = await asyncio.start_server(connection, "127.0.0.1", listens, ssl=context)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))

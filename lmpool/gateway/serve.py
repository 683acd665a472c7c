"""A gateway as a process: uvicorn, with bounds on the heads of requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import re
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lmpool.gateway.app import create_app
from lmpool.gateway.door import ABORT, ENDING, GRACE, STALL
from lmpool.gateway.errors import ApiError
from lmpool.gateway.options import GatewayOptions
from lmpool.insistence import Insistence
from lmpool.listening import cannot_listen
from lmpool.tracing import set_up

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 65_536
MOST_FRAMING: Final = 16
"""Bytes that frame one of a body, where it comes in the smallest chunks."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_UPGRADE: Final = re.compile(rb"\r\nUpgrade:", re.IGNORECASE)
_MARKS: Final = (b"\r\nupgrade:", b"\r\n\r\n")
"""What is looked for in a head: such an offer, and its end."""
UNREADABLE: Final = (
    "no HTTP/1.1 that can be read: send well-formed lines, no TLS, of which a proxy before this "
    "gateway takes care, and a body with its one Content-Length or in chunks, not with both"
)
SEND_BYTES: Final = 1 << 18
"""Of an answer that the system holds for a reader: of more it would not be seen for minutes that a
slow one reads at all."""
AHEAD: Final = 16
"""Requests of a connection that wait for the answers of those before them, and have
`MAX_HEAD_BYTES`."""
BACKLOG: Final = 2048
"""Connections that wait to be taken."""
FILES: Final = 16_384
"""That may be open: requests, connections between two of them, and what else there is."""
REMEDIES: Final[Mapping[int, str]] = {
    errno.EMFILE: "raise that (ulimit -n, LimitNOFILE= of systemd)",
    errno.ENFILE: "raise the system's bound (fs.file-max)",
}
"""Of what it says that has no descriptor left."""
TICKS: Final = 10
"""Of uvicorn's, a tenth of a second each, between two looks for that."""
SAID_EVERY: Final = 60.0
"""Seconds between two words on the same want."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises `SettingsError`."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # and what it takes in
        return listener
    except (OSError, OverflowError, TypeError, ValueError) as error:
        raise cannot_listen(host, port, error) from None


class _Files:
    """Says that there is no room for more connections: uvloop ends those that it has no descriptor
    for without a word."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._said_at = -math.inf

    def look(self) -> None:
        """See whether there is room for one more."""
        try:
            self._listener.dup().close()
        except OSError as error:
            remedy, now = REMEDIES.get(error.errno or 0), time.monotonic()
            if remedy is None or now - self._said_at < SAID_EVERY:
                return
            self._said_at = now
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            logger.warning(
                "connections are turned away: %s (%s), and this process may have %d open: %s, or "
                "start more gateways elsewhere",
                *("no descriptor is free", error.strerror, most, remedy),
            )


class _Protocol(HttpToolsProtocol):
    """uvicorn's, whose heads have `seconds` to arrive, and `MAX_HEAD_BYTES`."""

    seconds: ClassVar[float]
    patience: ClassVar[float] = STALL + GRACE
    """Seconds for a caller to take what waits for it. The door waits for less, and says why it cuts
    an answer, but sees neither paths without a key nor the end of an answer."""
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _begun = b""
    """Of a head, what may be the beginning of a mark."""
    _head: int | None = None
    """Bytes of a head that is arriving."""
    _waiting = b""
    """What came behind a request that waits for the last one's answer: it is read after that. The
    connection is not left unread meanwhile, as nobody would see then that its caller hangs up."""
    _answering: RequestResponseCycle | None = None
    _beside = _body = 0
    """Bytes of a body, and those that came behind a head and are none of a body."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # whatever is not taken at once is unread
        self._ending = asyncio.Event()
        self._begin()

    def shutdown(self) -> None:
        self._ending.set()
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._taken()
        answering = self._answering
        if answering is not None and not answering.response_complete:
            answering.disconnected = True  # uvicorn tells the latest request alone
            answering.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # One that is closed would wait for its reader for ever, too.
        self._unread = self.loop.call_later(self.patience, self.transport.abort)

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()

    def _taken(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        if self.pipeline:
            self._waiting += data
            if len(self._waiting) > MAX_HEAD_BYTES:
                self.transport.abort()
            return
        if self._head is not None:
            self._head += len(data)
        else:
            self._beside += len(data)
        super().data_received(self._without_upgrade(data))
        if self._head is not None and self._head > MAX_HEAD_BYTES:
            self._late()
        if self._beside > MAX_HEAD_BYTES + MOST_FRAMING * self._body:
            self.transport.abort()  # trailers, which uvicorn keeps, however many they are

    def _without_upgrade(self, data: bytes) -> bytes:
        """The same where it has no head in it, or one that asks for no other protocol.

        httptools ends such a request at its head: its body, as Java's client sends it beside an
        offer of HTTP/2, would be lost.
        """
        last: Any = self.cycle  # None before the first
        if self._head is None and last is not None and not last.response_complete:
            return data
        head, end, rest = (self._begun + data).partition(b"\r\n\r\n")
        self._begun = b"" if end else _begun_mark(head)
        head = head.removesuffix(self._begun)
        return _UPGRADE.sub(b"\r\nX-Other:", head) + end + rest

    def _unsupported_upgrade_warning(self) -> None:
        if self.pipeline:  # it waits for the last one's answer, and its body is lost
            self.transport.abort()
        else:
            super()._unsupported_upgrade_warning()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP as all errors are, where nothing else is being answered."""
        last: Any = self.cycle  # None before the first
        if last is not None and last.response_started and not last.response_complete:
            self.transport.abort()  # it would be read as a part of that
        if self.transport.is_closing():
            return
        error = ApiError(400, UNREADABLE)
        body = error.body()
        headers = {**error.headers(), "content-length": str(len(body)), "connection": "close"}
        lines = ["HTTP/1.1 400 Bad Request", *(f"{name}: {its}" for name, its in headers.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._beside -= len(body)
        self._body += len(body)
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > MAX_HEAD_BYTES:
            self.transport.abort()  # uvicorn would leave the connection unread

    def on_response_complete(self) -> None:
        ended = self.cycle.response_complete and self.cycle.more_body
        super().on_response_complete()
        if ended:
            self.transport.close()  # answered, and its body has not ended
        elif self._waiting and not self.pipeline and not self.transport.is_closing():
            waiting, self._waiting = self._waiting, b""
            self.data_received(waiting)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= AHEAD:
            self.transport.abort()
            raise ValueError("too many requests before the last one's answer")
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope[ENDING] = self._ending  # type: ignore[typeddict-unknown-key]
        self._beside = self._body = 0
        if self._head is None:
            self._begin()

    def on_headers_complete(self) -> None:
        self._end()
        fields = sum([len(name) + len(value) + 4 for name, value in self.headers])
        parser: Any = self.parser
        line = len(parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n")
        if line + fields + 2 > MAX_HEAD_BYTES:  # which came in one read
            self.transport.close()
            raise ValueError("too long a head")
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()

    def _begin(self) -> None:
        self._head = 0
        self._timer = self.loop.call_later(self.seconds, self._late)

    def _end(self) -> None:
        self._head = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self._head is not None and not self.transport.is_closing():
            self.transport.close()


def _begun_mark(head: bytes) -> bytes:
    """The end of what came of a head where the rest may make it a mark: it waits for that."""
    for size in range(max(map(len, _MARKS)) - 1, 0, -1):
        end = head[-size:]
        if any(mark.startswith(end.lower()) for mark in _MARKS):
            return end
    return b""


def protocol(seconds: float) -> type[HttpToolsProtocol]:
    """The protocol of a server whose heads have so many seconds to arrive."""
    return type("Protocol", (_Protocol,), {"seconds": seconds})


class _Server(uvicorn.Server):
    """Ends on a signal as it should, and is not ended by it once more afterwards.

    Nor hastened by the same Ctrl-C, which a terminal sends and who started it may pass on.
    """

    def __init__(
        self, config: uvicorn.Config, files: _Files, insistence: Insistence | None = None
    ) -> None:
        super().__init__(config)
        self._files = files
        self._insistence = insistence or Insistence()

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS == 0:
            self._files.look()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._insistence.insists() or not self.should_exit:
            super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _raise_bound_of_files() -> None:
    """A shell's own is 1,024 mostly, beyond which no connection is taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # where the system has a bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def serve(
    options: GatewayOptions,
    host: str,
    port: int,
    show: Callable[[str], None],
    *,
    page_alone: bool = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C; `show` is told the URL. Raises `SettingsError`.

    `page_alone`: the live page, and none of the APIs.
    """
    end_traces = set_up("lmpool-gateway")
    app = create_app(options, page_alone=page_alone)
    _raise_bound_of_files()
    listener = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    show(f"http://{name}:{listener.getsockname()[1]}")
    config = uvicorn.Config(
        app,
        http=protocol(options.body_timeout),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=10,
    )
    try:
        _Server(config, _Files(listener)).run(sockets=[listener])
    finally:
        end_traces()

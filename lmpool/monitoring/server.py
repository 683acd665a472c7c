"""A small HTTP server of a process: ``/metrics``, ``/health``, ``/ready``."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from socketserver import TCPServer
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from lmpool.errors import SettingsError
from lmpool.listening import cannot_listen

logger = logging.getLogger(__name__)

SILENT: Final = 5.0
"""Seconds for which one who asks may say nothing."""
TAKES: Final = 30.0
"""Seconds for all of a request and its answer."""
MOST: Final = 16
"""Requests that are answered at once."""
TRY_AGAIN: Final = 5.0
"""Seconds between two tries at a port that another process has."""
LOOK_EVERY: Final = 0.5
"""Seconds after which an idle server notices that it is closed."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a process can do its work now, and what there is to say of it."""

    ready: bool
    says: dict[str, Any] = field(default_factory=dict)


Look = Callable[[], Readiness]


def application(registry: CollectorRegistry, look: Look) -> Callable[..., Iterable[bytes]]:
    """The WSGI application of the three paths."""
    metrics: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)

    def answer(environ: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        path, method = environ.get("PATH_INFO", "/"), environ.get("REQUEST_METHOD", "GET")
        if method not in ("GET", "HEAD"):
            return _json(respond, "405 Method Not Allowed", {"error": "GET alone"}, method)
        match path:
            case "/metrics":
                return metrics(environ, respond)
            case "/health":
                return _json(respond, "200 OK", {"status": "ok"}, method)
            case "/ready":
                found = look()
                status = "200 OK" if found.ready else "503 Service Unavailable"
                return _json(respond, status, found.says, method)
            case _:
                known = {"error": "not here", "paths": ["/metrics", "/health", "/ready"]}
                return _json(respond, "404 Not Found", known, method)

    return answer


def _json(
    respond: StartResponse, status: str, says: dict[str, Any], method: str
) -> Iterable[bytes]:
    body = json.dumps(says).encode() + b"\n"
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    respond(status, [*headers, ("Cache-Control", "no-store")])
    return [] if method == "HEAD" else [body]


class _Handler(WSGIRequestHandler):
    timeout = SILENT
    server_version = "lmpool"
    sys_version = ""

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def get_stderr(self) -> Any:
        return _Said()


class _Said:
    """Where wsgiref writes what an application raised."""

    def write(self, text: str) -> None:
        if text.strip():
            logger.warning("%s", text.strip())

    def flush(self) -> None:
        pass


class _Server(WSGIServer):
    """A thread for each request, `MOST` of them: for one more the oldest is hung up on."""

    request_queue_size = 32

    def __init__(self, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: dict[socket.socket, float] = {}
        """Until when each may take, in the order in which they came."""
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks a name server who we are.
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:  # no file is left for it, and it goes on waiting
            time.sleep(LOOK_EVERY)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            late = [next(iter(self._open))] if len(self._open) >= MOST else []
            self._open[request] = time.monotonic() + TAKES
        _hang_up(late)
        given = (request, client_address)
        try:
            threading.Thread(target=self._answer, args=given, daemon=True).start()
        except RuntimeError as error:  # no thread is left
            logger.debug("nobody can look at this process: %s", error)
            self._forget(request)

    def end_late(self) -> None:
        """Hang up on those whose time is over: a byte now and then is no request."""
        now = time.monotonic()
        with self._lock:
            late = [each for each, until in self._open.items() if until < now]
        _hang_up(late)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # whoever asked has hung up, or never asked
            logger.debug("a look at this process failed", exc_info=True)
        finally:
            self._forget(request)

    def _forget(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        self.shutdown_request(request)


def _hang_up(connections: Iterable[socket.socket]) -> None:
    """Wake the threads that read from them, which close them."""
    for each in connections:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class MonitoringServer:
    """Serves an application on a thread of its own, from `start` to `close`.

    A port that is taken keeps nothing from its work: it is said, and tried again until it is free.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], host: str, port: int) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._server: _Server | None = None

    @property
    def port(self) -> int | None:
        """The port that it listens on; None while it cannot."""
        server = self._server
        return None if server is None else server.server_port

    def listen(self) -> None:
        """Take the port. Raises `SettingsError` where it cannot be had."""
        try:
            server = _Server((self._host, self._port))
        except (OSError, OverflowError, TypeError, ValueError) as error:
            raise cannot_listen(self._host, self._port, error) from None
        server.set_app(self._app)
        server.timeout = LOOK_EVERY
        self._server = server
        shown = f"[{self._host}]" if ":" in self._host else self._host
        logger.info(
            "metrics at http://%s:%d/metrics, beside /health and /ready", shown, server.server_port
        )

    def start(self) -> None:
        """Begin; a port that is taken is said, and waited for. Once."""
        if self._server is None:
            try:
                self.listen()
            except SettingsError as error:
                logger.error("no metrics for now, tried again every %g s: %s", TRY_AGAIN, error)
        self._thread = threading.Thread(target=self._run, name="lmpool-monitoring", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it. Blocks; idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(5)

    def _run(self) -> None:
        while self._server is None:
            if self._closing.wait(TRY_AGAIN):
                return
            with contextlib.suppress(SettingsError):  # which was said
                self.listen()
        # Not serve_forever, whose end nobody may wait for before it has begun.
        while not self._closing.is_set():
            self._server.handle_request()
            self._server.end_late()
        self._server.server_close()

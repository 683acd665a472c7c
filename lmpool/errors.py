"""Every error lmpool raises, as one tree.

::

    LmpoolError
    ├── SettingsError (ValueError)        a setting or argument that cannot be used
    ├── PromptError (ValueError)          a prompt refused before anything was sent
    ├── UnknownAdapter (ValueError)       no adapter of that name in the pool
    ├── AdapterError (ValueError)         an adapter that a worker refused to load
    ├── PoolError
    │   ├── UnknownPool                   nothing has ever been served under that name
    │   ├── NoWorkers                     the pool exists, none of its workers is alive
    │   ├── PoolBusy                      the backlog is at its bound
    │   └── PoolMismatch                  another model is served under that name
    ├── PoolTimeout (TimeoutError)        a wait was longer than its `timeout`
    │   └── JobExpired                    a worker saw first that it was
    ├── ServerError
    │   ├── ServerUnreachable             no connection, or not ready, or full
    │   ├── ServerRefused                 wrong password, user or permission
    │   └── ServerTooOld                  older than Redis 7.0
    ├── WireError (ValueError)
    │   ├── JobFormatError                an entry of the job stream that is no job
    │   └── AnswerFormatError             a cached value that is no answer
    │       └── RowFormatError            a cached value that is no row
    ├── EngineError
    │   ├── PromptFailed                  the engine failed on this prompt
    │   └── EngineBroken                  the engine cannot go on; the worker ends
    └── ClientClosed                      the PooledLM was closed
"""

from __future__ import annotations

from typing import Self

__all__ = [
    "AdapterError",
    "AnswerFormatError",
    "ClientClosed",
    "EngineBroken",
    "EngineError",
    "JobExpired",
    "JobFormatError",
    "LmpoolError",
    "NoWorkers",
    "PoolBusy",
    "PoolError",
    "PoolMismatch",
    "PoolTimeout",
    "PromptError",
    "PromptFailed",
    "RowFormatError",
    "ServerError",
    "ServerRefused",
    "ServerTooOld",
    "ServerUnreachable",
    "SettingsError",
    "UnknownAdapter",
    "UnknownPool",
    "WireError",
]


class LmpoolError(Exception):
    """Base of every error lmpool raises."""

    index: int | None = None
    """Where one prompt of a call failed: its number, from 0."""

    def of(self, index: int | None) -> Self:
        """This error as one caller's own: several may share it."""
        mine = type(self)(*self.args)
        mine.index = index
        return mine


class SettingsError(LmpoolError, ValueError):
    """A setting or argument that cannot be used; the message says what to write instead."""


class PromptError(LmpoolError, ValueError):
    """A prompt refused before anything was sent: empty, too long, or ids out of range."""


class UnknownAdapter(LmpoolError, ValueError):
    """No adapter of that name is registered under the pool."""


class AdapterError(LmpoolError, ValueError):
    """An adapter that a worker refused to load."""


class PoolError(LmpoolError):
    """The pool as a whole cannot serve."""


class UnknownPool(PoolError):
    """Nothing is served under that pool name on that server."""


class NoWorkers(PoolError):
    """The pool is known but none of its workers is alive."""


class PoolBusy(PoolError):
    """The pool's backlog is at its bound."""


class PoolMismatch(PoolError):
    """The pool serves something else than a client knows, or than a worker wants to serve."""


class PoolTimeout(LmpoolError, TimeoutError):
    """A wait was longer than the `timeout` it was given."""


class JobExpired(PoolTimeout):
    """A `PoolTimeout` that a worker told: the job's deadline passed before it was computed."""


class ServerError(LmpoolError):
    """The Redis-compatible server cannot be used."""


class ServerUnreachable(ServerError):
    """No connection to the server, or it is not ready: loading, failing over, or full."""


class ServerRefused(ServerError):
    """The server refused the user, the password or a command."""


class ServerTooOld(ServerError):
    """The server lacks commands that lmpool needs."""


class WireError(LmpoolError, ValueError):
    """Bytes that are not what the wire format says."""


class JobFormatError(WireError):
    """An entry of the job stream that is no job of a version we know."""


class AnswerFormatError(WireError):
    """A cached value that is no answer of a version we know."""


class RowFormatError(AnswerFormatError):
    """A cached value that is no row of a version we know."""


class EngineError(LmpoolError):
    """An engine failed."""


class PromptFailed(EngineError):
    """The engine failed on this prompt; others are not affected."""


class EngineBroken(EngineError):
    """The engine cannot go on: its worker gives its jobs back and ends."""


class ClientClosed(LmpoolError):
    """The PooledLM was closed while, or before, it was asked."""
